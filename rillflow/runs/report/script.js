document.querySelectorAll('svg.chart').forEach(function (svg) {
  var out = svg.closest('.card').querySelector('output');
  var line = svg.querySelector('.cursor'), dot = svg.querySelector('.dot'), d = svg.dataset, points = [];
  svg.querySelectorAll('.track').forEach(function (track) {
    track.getAttribute('points').split(' ').forEach(function (pair) {
      points.push(pair.split(',').map(Number));
    });
  });
  if (!out || !points.length) return;
  var base = svg.querySelector('.base');  // the horizontal axis; the cursor is as high as the vertical axis
  var box = {l: +base.getAttribute('x1'), r: +base.getAttribute('x2')};
  box.t = +line.getAttribute('y1'); box.b = +line.getAttribute('y2');
  function scale(v, a, b, c, e) { return +c + (v - a) / (b - a) * (e - c); }
  function show(event) {
    var frame = svg.getBoundingClientRect(), x = (event.clientX - frame.left) / frame.width * svg.viewBox.baseVal.width;
    var near = points.reduce(function (p, q) { return Math.abs(q[0] - x) < Math.abs(p[0] - x) ? q : p; });
    var step = Math.round(scale(near[0], box.l, box.r, d.x0, d.x1));
    var value = scale(near[1], box.b, box.t, d.y0, d.y1);
    if ('log' in d) value = Math.pow(10, value);
    out.textContent = 'step ' + step + ': ' + (Math.abs(value) < 1e-12 ? 0 : +value.toPrecision(3));
    line.setAttribute('x1', near[0]); line.setAttribute('x2', near[0]);
    dot.setAttribute('cx', near[0]); dot.setAttribute('cy', near[1]);
    svg.classList.add('on');
  }
  function hide() {
    out.textContent = out.dataset.last;
    svg.classList.remove('on');
  }
  svg.addEventListener('pointermove', show);
  svg.addEventListener('pointerdown', show);
  svg.addEventListener('pointerleave', hide);
});
