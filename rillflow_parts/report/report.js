// The report's charts. Each `.chart` has its data in an attribute; the view is in the address after #.

import { Chart } from "./chart.js";
import { caption, controls, drawn, plainNumber, PLAIN, reading } from "./controls.js";
import { number } from "./numbers.js";

let view = readView();
const charts = new Map();

function readView() {
  const given = new URLSearchParams(location.hash.slice(1));
  const found = { ...PLAIN };
  if (given.has("span")) found.span = given.get("span") === "auto" ? "auto" : Number(given.get("span")) || 0;
  for (const name of ["axes", "filter"]) found[name] = given.get(name) ?? "";
  for (const name of ["from", "to"])
    found[name] =
      given.has(name) && Number.isFinite(Number(given.get(name))) ? Number(given.get(name)) : null;
  return found;
}

function writeView() {
  const kept = new URLSearchParams();
  for (const [name, value] of Object.entries(view)) {
    if (value !== PLAIN[name])
      kept.set(name, typeof value === "number" && name !== "span" ? plainNumber(value) : value);
  }
  history.replaceState(null, "", `#${kept}`);
}

function change(fields) {
  view = { ...view, ...fields };
  writeView();
  show();
}

function show() {
  toolbar?.show(view);
  for (const [box, chart] of charts) if (chart) draw(box, chart);
  const words = view.filter.toLowerCase();
  document.querySelectorAll(".curves > .card").forEach((card) => {
    card.hidden = !(card.querySelector("h3")?.textContent ?? "").toLowerCase().includes(words);
  });
}

function draw(box, chart) {
  const data = JSON.parse(box.dataset.chart);
  const told = chart.draw(data, shown(box));
  box.closest("figure").querySelector("figcaption").textContent = caption(data.x_name, told);
}

// A chart whose x is not the step keeps its own range.
function shown(box) {
  const isStepped = JSON.parse(box.dataset.chart).is_stepped;
  return isStepped ? drawn(view) : { ...drawn(view), isLogX: false, from: null, to: null };
}

function start(box) {
  if (charts.get(box)) return;
  const data = JSON.parse(box.dataset.chart);
  const output = box.closest(".card")?.querySelector("output");
  const chart = new Chart(box, {
    zoom: (from, to) => data.is_stepped && change({ from, to }),
    hover: (values) => {
      if (!output) return;
      const known = values?.filter((each) => each !== null) ?? [];
      output.textContent =
        known.length > 0
          ? reading(
              data.x_name,
              known[0].x,
              known.map((each) => number(each.y)),
            )
          : output.dataset.last;
    },
  });
  charts.set(box, chart);
  draw(box, chart);
}

const place = document.querySelector("[data-controls]");
const toolbar = place ? controls(view, change) : null;
place?.replaceWith(toolbar.node);
const seen = new IntersectionObserver(
  (entries) => entries.filter((entry) => entry.isIntersecting).forEach((entry) => start(entry.target)),
  { rootMargin: "300px" },
);
document.querySelectorAll("[data-chart]").forEach((box) => {
  charts.set(box, null);
  seen.observe(box);
});
addEventListener("beforeprint", () => charts.forEach((_, box) => start(box)));
addEventListener("hashchange", () => {
  view = readView();
  show();
});
show();
