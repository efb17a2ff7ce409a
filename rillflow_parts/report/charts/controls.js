// The controls above charts: smoothing, axes, range of x, filter of the titles. They show a view and report changes.
//
// A view is {span, axes, from, to, filter}: span "auto", 0 or a number of steps; axes "" (each chart's own),
// "log", "linear", "logx" or "loglog"; from and to null for the ends of the data.

import { choice, el, labelled } from "./dom.js";
import { tick } from "./numbers.js";

export const SPANS = [
  ["auto", "automatic"],
  [0, "none"],
  [5, "5 steps"],
  [10, "10 steps"],
  [30, "30 steps"],
  [100, "100 steps"],
  [300, "300 steps"],
  [1000, "1,000 steps"],
];
export const AXES = [
  ["", "as suits each"],
  ["linear", "linear"],
  ["log", "log y"],
  ["logx", "log x"],
  ["loglog", "log x and y"],
];
export const PLAIN = { span: "auto", axes: "", from: null, to: null, filter: "" };

// Return the options of a view for Chart.draw.
export function drawn(view) {
  const isLogY = { log: true, loglog: true, linear: false }[view.axes];
  return {
    span: view.span,
    isLogY,
    isLogX: view.axes === "logx" || view.axes === "loglog",
    from: view.from,
    to: view.to,
  };
}

// Return the controls as {node, show(view)}; `changed` receives the changed fields. `more` are further controls.
export function controls(view, changed, more = []) {
  const range = (name) =>
    el("input", {
      type: "number",
      step: "any",
      size: 8,
      placeholder: name === "from" ? "first" : "last",
      change: (event) => changed({ [name]: event.target.value === "" ? null : Number(event.target.value) }),
    });
  const from = range("from"),
    to = range("to");
  const whole = el("button", { type: "button", click: () => changed({ from: null, to: null }) }, "Whole run");
  const span = choice(
    SPANS,
    view.span,
    (value) => changed({ span: value === "auto" ? value : Number(value) }),
    {
      title:
        "Exponential moving average of the drawn curve; its weight is 1 - 2 / (steps + 1) for each step back. The faint line is the curve itself.",
    },
  );
  const axes = choice(AXES, view.axes, (value) => changed({ axes: value }));
  const filter = el("input", {
    type: "search",
    placeholder: "part of a name",
    input: (event) => changed({ filter: event.target.value }),
  });
  const node = el(
    "div",
    { class: "controls", role: "group", "aria-label": "Charts" },
    more,
    labelled("Smoothing", span),
    labelled("Axes", axes),
    el("span", { class: "range" }, labelled("From", from), labelled("to", to), whole),
    labelled("Filter", filter),
  );
  const show = (now) => {
    for (const [control, value] of [
      [from, now.from],
      [to, now.to],
    ])
      control.value = value === null ? "" : plainNumber(value);
    span.value = String(now.span);
    axes.value = now.axes;
    if (document.activeElement !== filter) filter.value = now.filter;
    whole.disabled = now.from === null && now.to === null;
  };
  show(view);
  return { node, show };
}

// Return the words below a chart: the name of its x, its smoothing, and what a logarithmic axis does not show.
export function caption(name, { span, hidden }) {
  const parts = [name];
  if (span > 1) parts.push(`bold: moving average, ${tick(span)} steps`);
  if (hidden > 0) parts.push(`${tick(hidden)} below 0 not shown`);
  return parts.join(" · ");
}

// Return a number as the address and the fields show it.
export function plainNumber(value) {
  return String(Number(Number(value).toPrecision(6)));
}

// Return the words beside a chart's title while the pointer is at x: "step 12: 0.45".
export function reading(name, x, values) {
  const at =
    name === "seconds"
      ? `${tick(Number(x.toPrecision(6)))} s`
      : ["step", "phase", "tokens"].includes(name)
        ? `${name === "phase" ? "step" : name} ${tick(Math.round(x))}`
        : tick(Number(x.toPrecision(4)));
  return `${at}: ${values.join(", ")}`;
}
