// Charts: draw curves with uPlot, which the page loads before this module as the global `uPlot`.
//
//   chart {curves, x_name, is_log, ...} + view {span, from, to, ...} ─ Chart ─> canvas, legend, cursor
//
// A curve is {label, colour, x, y, low, high, unit}: y with null for a gap, low and high the ends of a band
// (an interval, or the least and largest value of a bucket of steps), unit the distance of two steps on x.

import { el, fill } from "./dom.js";
import { heatHooks, heatTable } from "./heat.js";
import { number, tick } from "./numbers.js";
import { automatic, broken, drawable, leastPositive, nearest, positive, smoothed } from "./series.js";

const HEIGHT = 220;
const FONT = '12px system-ui, -apple-system, "Segoe UI", Roboto, sans-serif';
const WHOLE = [1, 2, 5]
  .flatMap((factor) => [...Array(12).keys()].map((power) => factor * 10 ** power))
  .sort((a, b) => a - b);

// Return a colour of the style sheet, which knows light and dark.
export function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

function faint(hex, alpha) {
  const digits = hex.length === 4 ? [...hex.slice(1)].map((each) => each + each) : hex.slice(1).match(/../g);
  return `rgba(${digits.map((each) => parseInt(each, 16)).join(",")},${alpha})`;
}

export class Chart {
  // box: the element to draw in. actions.zoom(from, to) is called after a drag, zoom(null, null) after a double
  // click; actions.hover(values, x) with a value of every curve, or null, while the pointer moves.
  constructor(box, actions) {
    this.box = box;
    this.actions = actions;
    this.plot = null;
    this.resizing = new ResizeObserver(() => this.resize());
    this.scheme = matchMedia("(prefers-color-scheme: dark)");
    this.recoloured = () => this.plot?.redraw(false, true);
    this.scheme.addEventListener("change", this.recoloured);
  }

  // Draw a chart, in place of what was drawn before. Return {span, hidden}: the steps of its smoothing, 0 without
  // one, and how many negative values a logarithmic axis does not show.
  draw(chart, view) {
    this.plot?.destroy();
    this.plot = null;
    this.chart = chart;
    this.view = view;
    const span = spanOf(chart, view);
    this.curves = chart.heat ? [] : prepared(chart, view, span);
    const table = chart.heat ? heatTable(chart.heat) : joinedTable(this.curves);
    if (table[0].length === 0) {
      fill(this.box, el("p", { class: "empty" }, missing(chart, view)));
      return { span: 0, hidden: 0 };
    }
    fill(this.box);
    this.box.tabIndex = 0;
    this.box.setAttribute("role", "img");
    this.box.setAttribute("aria-label", spoken(chart));
    this.box.onkeydown = (event) => this.key(event);
    this.plot = new uPlot(this.options(table), table, this.box);
    this.resizing.observe(this.box);
    return { span, hidden: isLog(chart, view) ? negative(chart) : 0 };
  }

  // Show x from `from` to `to`; null is the end of the data.
  zoom(from, to) {
    this.view = { ...this.view, from, to };
    if (this.plot) {
      const [min, max] = this.xRange(this.plot.data[0][0], this.plot.data[0].at(-1));
      this.plot.setScale("x", { min, max });
    }
  }

  destroy() {
    this.resizing.disconnect();
    this.scheme.removeEventListener("change", this.recoloured);
    this.plot?.destroy();
    this.plot = null;
  }

  resize() {
    const width = Math.floor(this.box.clientWidth);
    if (this.plot && width > 0 && width !== this.plot.width)
      this.plot.setSize({ width, height: this.plot.height });
  }

  // Move the cursor by the arrow keys; Escape leaves it.
  key(event) {
    const plot = this.plot;
    if (!plot || !["ArrowLeft", "ArrowRight", "Escape"].includes(event.key)) return;
    event.preventDefault();
    if (event.key === "Escape") {
      plot.setCursor({ left: -10, top: -10 });
      return;
    }
    const place = plot.cursor.idx ?? (event.key === "ArrowRight" ? -1 : plot.data[0].length);
    const next = Math.min(
      plot.data[0].length - 1,
      Math.max(0, place + (event.key === "ArrowRight" ? 1 : -1)),
    );
    plot.setCursor({
      left: plot.valToPos(plot.data[0][next], "x"),
      top: plot.bbox.height / 2 / devicePixelRatio,
    });
  }

  options(table) {
    const { chart, view } = this;
    return {
      width: Math.max(200, Math.floor(this.box.clientWidth)),
      height: view.height ?? chart.height ?? HEIGHT,
      legend: { show: false },
      padding: [(chart.phases ?? []).length > 1 ? 18 : 8, 20, 0, 0],
      scales: {
        x: { time: false, distr: view.isLogX ? 3 : 1, range: (_, min, max) => this.xRange(min, max) },
        y: { distr: isLog(chart, view) ? 3 : 1, range: (_, min, max) => this.yRange(min, max) },
      },
      axes: [this.axis("x"), chart.heat ? heatHooks.axis(chart.heat, FONT, colour) : this.axis("y")],
      series: [{}, ...(chart.heat ? [heatHooks.series()] : this.series())],
      bands: bandsOf(this.curves),
      cursor: this.cursor(),
      hooks: {
        drawClear: [(plot) => drawPhases(plot, chart.phases ?? [])],
        draw: chart.heat ? [(plot) => heatHooks.draw(plot, chart.heat, colour("c0"), table[0])] : [],
        setSelect: [(plot) => this.selected(plot)],
        setCursor: [(plot) => this.hovered(plot)],
      },
    };
  }

  axis(scale) {
    const isX = scale === "x";
    return {
      scale,
      font: FONT,
      stroke: () => colour("soft"),
      grid: { show: !isX, stroke: () => colour("grid"), width: 1 },
      ticks: { show: isX, stroke: () => colour("hair"), width: 1, size: 4 },
      values: (_, splits) => splits.map((each) => (each === null ? "" : tick(each))),
      space: isX ? 50 : 32,
      size: isX
        ? 30
        : (_, values) => 16 + 6.6 * Math.max(2, ...(values ?? [""]).map((each) => String(each ?? "").length)),
      ...(isX && this.chart.is_stepped && !this.view.isLogX ? { incrs: WHOLE } : {}),
    };
  }

  // For every curve: the ends of its band, its values (faint if they are smoothed), and its smoothed values.
  series() {
    const marks = this.chart.has_marks;
    return this.curves.flatMap((curve) => {
      const stroke = () => colour(`c${curve.colour % 8}`);
      const hidden = { stroke: "transparent", width: 0, points: { show: false } };
      const line = {
        stroke: curve.smooth ? () => faint(stroke(), 0.35) : stroke,
        width: curve.smooth ? 1 : 2,
        points: marks
          ? { show: true, size: 7, width: 2, stroke, fill: () => colour("card") }
          : { show: false },
      };
      return [
        ...(curve.low ? [hidden, hidden] : []),
        line,
        ...(curve.smooth ? [{ stroke, width: 2.2, points: { show: false } }] : []),
      ];
    });
  }

  cursor() {
    return {
      y: false,
      drag: { x: true, y: false, setScale: false },
      bind: { dblclick: () => () => this.actions.zoom(null, null) },
      sync: { key: "charts", setSeries: false, scales: ["x", null] },
      points: { show: !this.chart.heat, size: 7 },
      dataIdx: (plot, place, found, at) => {
        const values = plot.data[place];
        return place === 0 || !values ? found : Math.max(0, nearest(plot.data[0], values, at));
      },
    };
  }

  selected(plot) {
    if (plot.select.width < 4) return;
    const from = plot.posToVal(plot.select.left, "x"),
      to = plot.posToVal(plot.select.left + plot.select.width, "x");
    plot.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
    if (to > from) this.actions.zoom(from, to);
  }

  hovered(plot) {
    if (plot.cursor.left === null || plot.cursor.left === undefined || plot.cursor.left < 0) {
      this.actions.hover?.(null, null);
      return;
    }
    const at = plot.posToVal(plot.cursor.left, "x");
    const values = this.curves.map((curve) => {
      const place = nearest(curve.x, curve.y, at);
      return place < 0
        ? null
        : { x: curve.x[place], y: curve.y[place], smooth: curve.smooth?.[place] ?? null };
    });
    this.actions.hover?.(values, at);
  }

  xRange(low, high) {
    const from = this.view.from ?? low,
      to = this.view.to ?? high;
    if (this.view.isLogX)
      return from > 0 && to > from ? [from, to] : uPlot.rangeLog(Math.max(low, 1e-9), high, 10, false);
    return to > from ? [from, to] : [from - 1, from + 1];
  }

  yRange(low, high) {
    if (low === null || high === null) return isLog(this.chart, this.view) ? [0.1, 1] : [0, 1];
    if (isLog(this.chart, this.view)) return uPlot.rangeLog(low, high, 10, false);
    if (this.chart.heat) return [0, this.chart.heat.edges.length + 1];
    if (this.chart.is_share) return [Math.min(0, low), Math.max(1, high)];
    const start = low > 0 && low < 0.4 * high ? 0 : low;
    if (high - start < 1e-9 * Math.max(1, Math.abs(high))) {
      if (high === 0) return [0, 1]; // always 0: a share or a count, which has no negative side
      const room = Math.abs(high) * 0.1;
      return [low - room, high + room];
    }
    const room = 0.05 * (high - start);
    return [start === 0 ? 0 : start - room, high + room];
  }
}

function isLog(chart, view) {
  return view.isLogY ?? Boolean(chart.is_log);
}

// Return the span of the smoothing in steps; all curves of a chart have the same.
function spanOf(chart, view) {
  if (chart.heat || chart.has_marks) return 0;
  if (view.span !== "auto") return Number(view.span) > 1 ? Number(view.span) : 0;
  return automatic(
    Math.max(0, ...chart.curves.map(({ x, unit }) => (x.length > 0 ? (x.at(-1) - x[0]) / (unit || 1) : 0))),
  );
}

// Return the curves as they are drawn: broken, on a logarithmic axis without values that it has no place for,
// and smoothed.
function prepared(chart, view, span) {
  const logY = isLog(chart, view);
  const least = logY ? leastPositive(chart.curves.flatMap((curve) => [curve.y, curve.low ?? []])) : null;
  return chart.curves.map((given) => {
    const curve = broken(view.isLogX ? aboveZero(given) : given, chart.has_marks ? [] : (chart.phases ?? []));
    for (const key of ["y", "low", "high"]) {
      if (logY && curve[key])
        curve[key] = least === null ? curve[key].map(() => null) : positive(curve[key], least);
    }
    return span > 1 && curve.x.length > 2
      ? { ...curve, smooth: smoothed(curve.x, curve.y, span, curve.unit || 1) }
      : curve;
  });
}

function negative(chart) {
  return (chart.curves ?? []).reduce((sum, curve) => sum + curve.y.filter((value) => value < 0).length, 0);
}

function aboveZero(curve) {
  const kept = curve.x.map((x) => x > 0);
  const pick = (list) => list?.filter((_, place) => kept[place]);
  return { ...curve, x: pick(curve.x), y: pick(curve.y), low: pick(curve.low), high: pick(curve.high) };
}

// Return one table of all curves for uPlot; a curve without a value at another's x is drawn across it.
function joinedTable(curves) {
  const shown = curves.filter((curve) => curve.y.some(drawable));
  if (shown.length === 0) return [[]];
  const tables = curves.map((curve) => [
    curve.x,
    ...(curve.low ? [curve.low, curve.high] : []),
    curve.y,
    ...(curve.smooth ? [curve.smooth] : []),
  ]);
  return tables.length === 1 ? tables[0] : uPlot.join(tables);
}

function bandsOf(curves) {
  const bands = [];
  let place = 1;
  for (const curve of curves) {
    const fillColour = () => faint(colour(`c${curve.colour % 8}`), curve.smooth ? 0.1 : 0.16);
    if (curve.low) bands.push({ series: [place + 1, place], fill: fillColour });
    place += 1 + (curve.low ? 2 : 0) + (curve.smooth ? 1 : 0);
  }
  return bands;
}

// Shade every second phase and write the names above, when there is more than one.
function drawPhases(plot, phases) {
  const { ctx, bbox } = plot;
  const [low, high] = [plot.scales.x.min, plot.scales.x.max];
  const shown = phases.filter((phase) => phase.last > low && phase.first < high);
  if (shown.length < 2) return;
  ctx.save();
  ctx.font = `600 ${12 * devicePixelRatio}px ${FONT.slice(5)}`;
  ctx.textBaseline = "bottom";
  for (const phase of shown) {
    const start = plot.valToPos(Math.max(low, phase.first - 0.5), "x", true);
    const end = plot.valToPos(Math.min(high, phase.last + 0.5), "x", true);
    ctx.fillStyle = colour(`p${phases.indexOf(phase) % 2}`);
    ctx.fillRect(start, bbox.top, end - start, bbox.height);
    ctx.fillStyle = colour("soft");
    const isWide = ctx.measureText(phase.name).width < end - start - 6;
    ctx.textAlign = isWide ? "left" : "right";
    if (isWide || phase === shown.at(-1))
      ctx.fillText(phase.name, isWide ? start + 3 * devicePixelRatio : end, bbox.top - 2);
  }
  ctx.restore();
}

function missing(chart, view) {
  const isEmpty = chart.curves?.every((curve) => !curve.y.some(drawable)) ?? true;
  return isEmpty
    ? "No finite value was recorded."
    : `No value above 0, which a logarithmic axis ${view.isLogX ? "of x " : ""}needs.`;
}

// Return the chart in words, for readers who do not see it.
function spoken(chart) {
  if (chart.heat) return "Shares of the values at each step.";
  const parts = chart.curves.map((curve) => {
    const known = curve.y.filter(drawable);
    return `${curve.label || chart.y_name || "curve"}: first ${number(known[0])}, last ${number(known.at(-1))}`;
  });
  return `${parts.join("; ")}. Arrow keys move the cursor.`;
}
