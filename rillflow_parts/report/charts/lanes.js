// Lanes: draw what each rank or replica did over time, as bars on one axis of seconds.
//
// timeline is {start_s, end_s, lanes: [{name, bars: [{from_s, to_s, kind, name, step}]}]}; kind is "stage", "wait"
// or "else".

import { el } from "./dom.js";
import { duration, tick } from "./numbers.js";

const FINEST = 4000; // bars of one stage and step that are closer than this part of the whole are one

// Return the drawing: lanes that scroll when `scale` times the width is more than there is, and a legend.
export function drawLanes(timeline, scale) {
  const whole = Math.max(1e-9, timeline.end_s - timeline.start_s);
  const colours = coloursOf(timeline.lanes);
  const at = (seconds) => `${(100 * (seconds - timeline.start_s)) / whole}%`;
  const tracks = timeline.lanes.map((lane) => {
    const track = el("div", { class: "lane-track" });
    for (const bar of merged(lane.bars, whole / FINEST))
      track.append(drawnBar(bar, colours, at, timeline.start_s));
    return el(
      "div",
      { class: "lane-row" },
      el("span", { class: "lane-name", title: lane.name }, lane.name),
      track,
    );
  });
  const axis = el(
    "div",
    { class: "lane-track lane-axis" },
    ticksOf(whole, 8 * scale).map((seconds) => {
      const label = el("span", {}, `${tick(seconds)} s`);
      label.style.left = at(timeline.start_s + seconds);
      return label;
    }),
  );
  const inner = el(
    "div",
    { class: "lanes" },
    tracks,
    el("div", { class: "lane-row" }, el("span", { class: "lane-name" }), axis),
  );
  inner.style.width = `${100 * scale}%`;
  return [
    el("div", { class: "scroll", tabindex: 0, role: "group", "aria-label": "Timeline" }, inner),
    el(
      "p",
      { class: "legend" },
      [...colours].map(([name, colour]) => keyOf(name, colour)),
      keyOf("waits, with the cause", "var(--rest)"),
    ),
  ];
}

function keyOf(name, colour) {
  const node = el("span", { class: "key" }, name);
  node.style.setProperty("--kc", colour);
  return node;
}

function drawnBar(bar, colours, at, start) {
  const step = bar.step ? `, step ${bar.step}` : "";
  const words = `${bar.name}${step}: ${duration(bar.to_s - bar.from_s)} from ${duration(Math.max(0, bar.from_s - start))}`;
  const node = el("i", { title: words });
  node.style.left = at(bar.from_s);
  node.style.width = `calc(${at(start + bar.to_s - bar.from_s)} + .5px)`;
  node.style.background = bar.kind === "stage" ? colours.get(bar.name) : "var(--rest)";
  return node;
}

// The stages with the most time have the colours that differ most.
function coloursOf(lanes) {
  const taken = new Map();
  for (const bar of lanes.flatMap((lane) => lane.bars)) {
    if (bar.kind === "stage") taken.set(bar.name, (taken.get(bar.name) ?? 0) + bar.to_s - bar.from_s);
  }
  const names = [...taken.keys()].sort((one, other) => taken.get(other) - taken.get(one));
  return new Map(
    names.map((name, place) => [
      name,
      place < 6 ? `var(--k${place})` : `hsl(${(place * 137.5) % 360} 45% 52%)`,
    ]),
  );
}

function merged(bars, gap) {
  const joined = [];
  for (const bar of [...bars].sort((one, other) => one.from_s - other.from_s)) {
    const last = joined.at(-1);
    if (last && last.name === bar.name && last.step === bar.step && bar.from_s - last.to_s < gap) {
      joined[joined.length - 1] = { ...last, to_s: Math.max(last.to_s, bar.to_s) };
    } else joined.push(bar);
  }
  return joined;
}

function ticksOf(whole, count) {
  const rough = whole / count,
    power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((factor) => power * factor >= rough * 0.999);
  const places = [...Array(Math.floor(whole / step) + 1).keys()].map((place) =>
    Number((place * step).toPrecision(6)),
  );
  return places.filter((seconds) => seconds <= whole - step / 3); // the words of one at the end would be cut off
}
