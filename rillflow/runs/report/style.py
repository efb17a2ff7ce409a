"""Inline style sheet and script of the report, so that the HTML file needs nothing else."""

from __future__ import annotations

COLOURS = 24
"""Number of distinct colours on a page."""
STYLE = """
:root {
  color-scheme: light dark; --paper:#f7f6f2; --card:#fff; --ink:#1c2430; --soft:#667080; --hair:#e5e2da;
  --grid:#eeece6; --main:#0b6e84; --second:#d9772b; --good:#217a4b; --bad:#b3372f;
  --band:rgba(11,110,132,.16); --p0:rgba(11,110,132,.05); --p1:rgba(217,119,43,.07); --shade:217,119,43;
  --edge:rgba(28,36,48,.28);
  --k0:#0b6e84; --k1:#d9772b; --k2:#6a5acd; --k3:#3f9b6c; --k4:#c2527f; --k5:#8a7a3b; --rest:#c9c5bb}
@media(prefers-color-scheme:dark){
  :root {
    --paper:#11151b; --card:#191f27; --ink:#e6eaf0; --soft:#96a1b0; --hair:#2a323d; --grid:#232a34;
    --main:#54c3d8; --second:#f2a65a; --good:#6fcf97; --bad:#f28b82; --band:rgba(84,195,216,.18);
    --edge:rgba(0,0,0,.7);
    --p0:rgba(84,195,216,.05); --p1:rgba(242,166,90,.07); --shade:242,140,60; --k0:#3fa9be; --k1:#e0924a;
    --k2:#9a8cf0; --k3:#5fbf8c; --k4:#e07ba5; --k5:#b9a75c; --rest:#4a5462}
}
* {box-sizing: border-box}
body {
  margin: 0; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
main {max-width: 1240px; margin: 0 auto; padding: 28px 20px 60px}
h1 {font-size: 1.55rem; line-height: 1.2; margin: 0; overflow-wrap: anywhere; letter-spacing: -.01em}
h2 {font-size: 1.1rem; margin: 38px 0 12px; letter-spacing: -.005em}
h3 {font-size: .95rem; margin: 0; overflow-wrap: anywhere}
p {margin: 0}
.hint,.legend,.facts,.empty,small {color: var(--soft); font-size: .82rem}
.hint {margin-top: 2px; min-height: 2.6em}
.samples .hint {min-height: 0}
.good {color: var(--good); font-size: .82rem}
.bad {color: var(--bad); font-size: .82rem}
.card {
  background: var(--card); border: 1px solid var(--hair); border-radius: 10px; padding: 14px 16px;
  min-width: 0}
.card>header {display: flex; gap: 12px; justify-content: space-between; align-items: baseline}
output {font-variant-numeric: tabular-nums; font-weight: 600; white-space: nowrap}
.grid-cards {display: grid; gap: 14px; grid-template-columns: repeat(auto-fill,minmax(min(100%,340px),1fr))}
.stack {display: grid; gap: 14px}
.pair {display: grid; gap: 14px; grid-template-columns: repeat(auto-fit,minmax(min(100%,360px),1fr))}
.hero {
  display: grid; gap: 18px 34px; grid-template-columns: repeat(auto-fit,minmax(min(100%,380px),1fr));
  align-items: center; padding: 22px 24px}
.hero dl {
  display: grid; grid-template-columns: max-content 1fr; gap: 3px 14px; margin: 14px 0 0;
  font-size: .88rem}
.hero dt {color: var(--soft)}
.hero dd {margin: 0; overflow-wrap: anywhere}
.change {
  font-size: 2.5rem; font-weight: 650; letter-spacing: -.02em; line-height: 1.1;
  font-variant-numeric: tabular-nums}
.change span {color: var(--soft); font-weight: 400}
.status {
  display: inline-block; border-radius: 99px; padding: 1px 10px; font-size: .78rem;
  border: 1px solid var(--hair); color: var(--soft); margin-left: 8px; vertical-align: middle}
svg.chart,svg.intervals {
  display: block; width: 100%; height: auto; margin-top: 6px; touch-action: pan-y; overflow: visible}
svg.timeline {display: block; width: 100%; min-width: 760px; height: auto; margin-top: 8px}
.lane {fill: var(--grid)}
.span {fill: var(--kc); stroke: var(--card); stroke-width: .6}
.span:hover {stroke: var(--ink)}
svg text {font-family: inherit; fill: var(--soft); font-size: 12px; font-variant-numeric: tabular-nums}
.middle {text-anchor: middle}
.end {text-anchor: end}
.phasename {font-weight: 600}
svg text.axis {font-size: 10.5px; font-style: italic}
.grid {stroke: var(--grid)}
.base {stroke: var(--hair)}
.line,.raw {fill: none; stroke-linejoin: round; stroke-linecap: round}
.line {stroke-width: 2.2}
.raw {stroke-width: 1; opacity: .32}
.c0 {stroke: var(--main)}
.cell {fill: var(--main)}
.c1 {stroke: var(--second)}
.mark {fill: var(--card); stroke-width: 2}
.band {fill: var(--band)}
.phase.p0 {fill: var(--p0)}
.phase.p1 {fill: var(--p1)}
.cursor {stroke: var(--soft); stroke-dasharray: 3 3}
.dot {fill: var(--main)}
.chart:not(.on) > .cursor, .chart:not(.on) > .dot {display: none}
.key::before {
  content: ""; display: inline-block; width: .7em; height: .7em; border-radius: 2px; margin-right: .5em;
  background: var(--kc)}
.legend .key {margin-right: 14px; white-space: nowrap; display: inline-block}
.legend:has(.tokens) {margin-bottom: 10px}
.key.c0 {--kc:var(--main)}
.key.c1 {--kc:var(--second)}
.k0 {--kc:var(--k0)}
.k1 {--kc:var(--k1)}
.k2 {--kc:var(--k2)}
.k3 {--kc:var(--k3)}
.k4 {--kc:var(--k4)}
.k5 {--kc:var(--k5)}
.k-rest {--kc:var(--rest)}
.o-score {--kc:var(--k3)}
.o-abstain {--kc:var(--rest)}
.o-timeout {--kc:var(--k1)}
.o-error {--kc:var(--bad)}
.bar {
  display: flex; height: 18px; border-radius: 5px; overflow: hidden; margin: 10px 0 8px;
  background: var(--grid)}
.bar i {background: var(--kc); min-width: 1px}
.scroll {
  overflow-x: auto; background:
    linear-gradient(to right,var(--card) 40%,transparent) 0 0/40px 100% local,
    linear-gradient(to left,var(--card) 40%,transparent) 100% 0/40px 100% local,
    linear-gradient(to right,var(--edge),transparent) 0 0/14px 100% scroll,
    linear-gradient(to left,var(--edge),transparent) 100% 0/14px 100% scroll;
  background-repeat: no-repeat}
table {border-collapse: collapse; width: 100%; font-size: .86rem; font-variant-numeric: tabular-nums}
th {font-weight: 500; color: var(--soft); text-align: right; white-space: nowrap}
th,td {padding: 4px 8px; border-top: 1px solid var(--hair)}
thead th {border-top: 0}
td {text-align: right; white-space: nowrap}
th:first-child,td:first-child {text-align: left; padding-left: 0}
.brief th {text-align: left}
.brief td {
  text-align: left; white-space: normal; overflow-wrap: anywhere; vertical-align: top;
  unicode-bidi: isolate}
.brief td:first-child {width: 1%; white-space: nowrap}
.brief {margin-top: 8px; color: var(--soft)}
.brief td span:not(.badge) {color: var(--ink)}
article {border-top: 1px solid var(--hair); margin-top: 12px; padding-top: 10px}
.facts {
  display: flex; flex-wrap: wrap; gap: 2px 12px; align-items: baseline;
  font-variant-numeric: tabular-nums}
.badge {
  border-radius: 99px; padding: 0 9px; font-size: .8rem; font-weight: 600;
  border: 1px solid currentColor; white-space: nowrap}
.badge.high {color: var(--good)}
.badge.low {color: var(--bad)}
.warn {color: var(--second)}
.prompt,.answer,pre {
  font: 13px/1.6 ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace;
  white-space: pre-wrap; overflow-wrap: anywhere; unicode-bidi: isolate}
.prompt {color: var(--soft); margin-top: 6px}
.answer {margin-top: 2px}
.samples .prompt,.samples .answer {max-height: 22em; overflow-y: auto}
.tokens i,.heat i {font-style: normal; border-radius: 2px; background: rgba(var(--shade),var(--a,0))}
.tokens q {color: var(--soft); quotes: none}
.tokens i:hover {outline: 1px solid var(--soft)}
.heat {margin-top: 5px; line-height: 0}
.heat i {display: inline-block; width: 7px; height: 12px; border: 1px solid var(--card)}
.s0 {--a:.04}
.s1 {--a:.14}
.s2 {--a:.26}
.s3 {--a:.4}
.s4 {--a:.55}
.s5 {--a:.72}
.s6 {--a:.9}
.legend .tokens i {padding: 0 4px; margin: 0 1px}
details {margin-top: 14px}
summary {cursor: pointer; font-weight: 600}
pre {
  background: var(--card); border: 1px solid var(--hair); border-radius: 10px; padding: 14px;
  margin: 10px 0 0; font-size: 12.5px}
details .grid-cards {margin-top: 12px}
footer {margin-top: 40px; color: var(--soft); font-size: .82rem}
@media(max-width:520px){
  main {padding: 16px 12px 40px}
  .hero {padding: 16px}
  .change {font-size: 2rem}
  svg text {font-size: 14px}
  .hint {min-height: 0}
}
@media print{
  .card {break-inside: avoid}
}
""" + "".join(f".k{place} {{--kc:hsl({place * 137.5 % 360:g} 45% 52%)}}\n" for place in range(6, COLOURS))

SCRIPT = """
document.querySelectorAll('svg.chart').forEach(function (svg) {
  var out = svg.closest('.card').querySelector('output');
  var line = svg.querySelector('.cursor'), dot = svg.querySelector('.dot'), d = svg.dataset;
  var box = {l: %(left)d, r: %(right)d, t: %(top)d, b: %(bottom)d}, points = [];
  svg.querySelectorAll('.track').forEach(function (track) {
    track.getAttribute('points').split(' ').forEach(function (pair) {
      points.push(pair.split(',').map(Number));
    });
  });
  if (!out || !points.length) return;
  function scale(v, a, b, c, e) { return +c + (v - a) / (b - a) * (e - c); }
  function show(event) {
    var frame = svg.getBoundingClientRect(), x = (event.clientX - frame.left) / frame.width * %(width)d;
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
"""
