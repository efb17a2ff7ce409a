// Curves: one card for each metric of the chosen runs, over steps, seconds or tokens.
//
//   summaries ─> names of the metrics ─> cards ─ those in sight ─ one request ─> data ─> Chart
//
// A zoom draws at once what is there, and then the finer data of that range.

import { Chart } from "./chart.js";
import { caption, controls, drawn, reading } from "./controls.js";
import { choice, el, fill, labelled } from "./dom.js";
import { number } from "./numbers.js";
import { get } from "./api.js";

const FIRST = [
  "reward/score/mean",
  "supervised/nll/mean",
  "supervised/accuracy/mean",
  "policy/loss/mean",
  "policy/entropy/mean",
  "policy/kl/mean",
  "policy/clipped/share",
  "train/grad_norm/mean",
  "rollout/length/mean",
  "rollout/stopped/share",
  "reward/flat_groups/share",
  "mismatch/logprob_gap/max",
  "staleness/kl/mean",
  "train/lr/mean",
];
const POINTS = { usual: 500, wide: 1500 }; // of a curve: two for each pixel or so
const AT_ONCE = 12; // metrics of one request
const HEIGHTS = { usual: 220, lead: 320, wide: 420 };
const AXES = [
  ["step", "steps"],
  ["phase", "steps of the last phase"],
  ["seconds", "seconds"],
  ["tokens", "sampled tokens"],
];
const HELD_OUT = "held-out ";
const UNMEASURED =
  'the trainer computed no log probabilities (algorithm.old_logprobs = "sampler"), so every value is 0 or 1 by construction.';

export class CurvesView {
  constructor(app) {
    this.app = app;
    this.cards = new Map();
    this.units = new Map();
    this.grown = 0; // counts live updates, so that data of before are asked for again
    this.notes = el("p", { class: "hint" });
    this.grid = el("div", { class: "grid-cards" });
    this.axis = choice(AXES, app.state.x, (x) => app.change({ x, from: null, to: null }));
    this.toolbar = controls(app.state, (fields) => app.change(fields, { isTyping: "filter" in fields }), [
      labelled("Over", this.axis),
    ]);
    this.node = el("div", {}, this.toolbar.node, this.grid, this.notes);
    this.seen = new IntersectionObserver((entries) => this.sighted(entries), { rootMargin: "200px" });
  }

  close() {
    this.seen.disconnect();
    for (const card of this.cards.values()) card.chart.destroy();
  }

  fail(told) {
    fill(this.notes, told);
  }

  async update(state, { isLive = false }) {
    this.toolbar.show(state);
    this.axis.value = state.x;
    if (isLive) this.grown += 1;
    const runs = state.runs;
    this.summaries = await Promise.all(runs.map((run) => this.app.summary(run)));
    if (state !== this.app.state) return;
    this.arrange(state);
    for (const card of this.cards.values()) if (card.data && card.isSeen) this.draw(card);
    await this.load();
  }

  // Make a card for each metric, remove those of metrics that are gone, and keep the order.
  arrange(state) {
    const names = new Set(
      this.summaries.flatMap((summary) =>
        (summary.metrics ?? []).filter((each) => each.reduction !== "histogram").map((each) => each.name),
      ),
    );
    const sets = new Set(
      this.summaries.flatMap((summary) =>
        (summary.evaluations ?? [])
          .filter((each) => typeof each[state.x] === "number")
          .map((each) => each.set ?? ""),
      ),
    );
    const rank = (name) => (FIRST.includes(name) ? FIRST.indexOf(name) : FIRST.length);
    const ordered = [
      ...[...sets].sort().map((set) => HELD_OUT + set),
      ...[...names].sort((one, other) => rank(one) - rank(other) || (one < other ? -1 : 1)),
    ];
    const words = state.filter.toLowerCase();
    const shown = ordered.filter(
      (name) => `${this.titleOf(name)} ${this.reportTitleOf(name)}`.toLowerCase().includes(words) || name === state.wide,
    );
    for (const [name, card] of this.cards) {
      if (shown.includes(name)) continue;
      this.seen.unobserve(card.node);
      card.chart.destroy();
      card.node.remove();
      this.cards.delete(name);
    }
    shown.forEach((name, place) => {
      const card = this.cards.get(name) ?? this.make(name);
      if (this.grid.children[place] !== card.node)
        this.grid.insertBefore(card.node, this.grid.children[place] ?? null);
      card.node.classList.toggle("wide-card", name === state.wide);
      card.node.classList.toggle("lead", isLead(name) && name !== state.wide);
      card.widen.textContent = name === state.wide ? "smaller" : "larger";
      card.widen.setAttribute("aria-label", `Draw ${this.titleOf(name)} ${card.widen.textContent}`);
    });
    fill(
      this.notes,
      state.runs.length === 0
        ? "No run is chosen."
        : shown.length === 0
          ? words
            ? "No metric has this in its name."
            : "No step is done yet."
          : "",
    );
  }

  titleOf(name) {
    if (!name.startsWith(HELD_OUT)) return name;
    const set = name.slice(HELD_OUT.length);
    const kinds = new Set(
      this.summaries.flatMap((summary) =>
        (summary.evaluations ?? []).filter((each) => (each.set ?? "") === set).map((each) => each.name),
      ),
    );
    const what = kinds.has("mean return") ? "Evaluation:" : "Held-out";
    return `${set || what} ${[...kinds].join(" and ")}`;
  }

  // Return the title that the report gives to a metric's curve.
  reportTitleOf(name) {
    const known = this.summaries.flatMap((summary) => summary.metrics ?? []);
    return known.find((each) => each.name === name)?.title ?? "";
  }

  helpOf(name) {
    if (name.startsWith(HELD_OUT))
      return "Held-out rows, or whole episodes, evaluated now and then. The band is the 95% interval.";
    const known = this.summaries.flatMap((summary) => summary.metrics ?? []);
    return known.find((each) => each.name === name)?.help ?? "";
  }

  make(name) {
    const { app } = this;
    const output = el("output", {}),
      legend = el("p", { class: "legend" }),
      note = el("p", { class: "hint" });
    const widen = el(
      "button",
      {
        type: "button",
        class: "quiet",
        click: () => app.change({ wide: app.state.wide === name ? "" : name }),
      },
      "larger",
    );
    const box = el("div", { class: "chart" });
    const help = this.helpOf(name),
      title = this.reportTitleOf(name);
    const axisName = el("figcaption", { class: "axis-x" });
    const node = el(
      "section",
      { class: "card", "data-metric": name },
      el("header", {}, el("h3", {}, this.titleOf(name)), output, widen),
      title ? el("p", { class: "metric" }, title) : null,
      help ? el("p", { class: "hint" }, help) : null,
      el("figure", {}, box, axisName),
      legend,
      note,
    );
    const card = { name, node, output, legend, note, widen, axisName, isSeen: false, data: null, key: "" };
    card.chart = new Chart(box, {
      zoom: (from, to) => app.change({ from, to }),
      hover: (values, x) => this.hovered(card, values, x),
    });
    this.cards.set(name, card);
    this.seen.observe(node);
    return card;
  }

  sighted(entries) {
    for (const entry of entries) {
      const card = this.cards.get(entry.target.dataset.metric);
      if (!card) continue;
      const isNew = entry.isIntersecting && !card.isSeen;
      card.isSeen = entry.isIntersecting;
      if (isNew && card.data) this.draw(card);
    }
    this.load().catch((error) => this.app.fail(error));
  }

  // Ask for the data of the cards in sight that do not have them.
  async load() {
    const state = this.app.state;
    if (!this.summaries || state.runs.length === 0) return;
    const keyOf = (card) =>
      [state.runs.join(), state.x, state.from, state.to, this.grown, pointsOf(card, state)].join("|");
    const due = [...this.cards.values()].filter((card) => card.isSeen && card.key !== keyOf(card));
    for (const card of due) card.key = keyOf(card);
    for (const card of due.filter((each) => each.name.startsWith(HELD_OUT))) {
      card.data = this.evaluated(card.name.slice(HELD_OUT.length), state);
      this.draw(card);
    }
    const metrics = due.filter((each) => !each.name.startsWith(HELD_OUT));
    const usual = metrics.filter((card) => card.name !== state.wide),
      parts = [metrics.filter((card) => card.name === state.wide)];
    for (let start = 0; start < usual.length; start += AT_ONCE)
      parts.push(usual.slice(start, start + AT_ONCE));
    await Promise.all(parts.filter((part) => part.length > 0).map((part) => this.loadPart(part, state)));
  }

  async loadPart(cards, state) {
    const keys = new Map(cards.map((card) => [card, card.key]));
    try {
      const wanted = { runs: state.runs, x: state.x, metrics: cards.map((card) => card.name) };
      const [found] = await Promise.all([
        get("curves", { ...wanted, points: pointsOf(cards[0], state), from: state.from, to: state.to }),
        !isStepped(state) && this.measureUnits(state, cards[0].name),
      ]);
      for (const card of cards.filter((each) => each.key === keys.get(each))) {
        const own = found.curves.filter((curve) => curve.metric === card.name && curve.x.length > 0);
        card.data = own.map((curve) =>
          curve.is_full ? { ...curve, low: undefined, high: undefined } : curve,
        );
        this.draw(card);
      }
    } catch (error) {
      for (const card of cards) card.key = "";
      throw error;
    }
  }

  // Find how far two steps are apart on an axis that does not count steps; the smoothing needs it.
  async measureUnits(state, metric) {
    const missing = state.runs.filter((run) => !this.units.has(`${run}|${state.x}`));
    if (missing.length === 0) return;
    const { curves } = await get("curves", {
      runs: missing,
      metrics: [metric],
      x: state.x,
      points: POINTS.usual,
    });
    for (const curve of curves) {
      const steps = this.app.runs.find((each) => each.run === curve.run)?.steps ?? curve.x.length;
      if (curve.x.length > 1)
        this.units.set(`${curve.run}|${state.x}`, (curve.x.at(-1) - curve.x[0]) / Math.max(1, steps - 1));
    }
  }

  evaluated(set, state) {
    const isShown = (each) => (each.set ?? "") === set && typeof each[state.x] === "number";
    const curves = state.runs.map((run, place) => {
      const found = (this.summaries[place].evaluations ?? []).filter(isShown);
      const end = (which) => found.map((each) => each.interval?.[which] ?? null);
      const hasBand = found.some((each) => each.interval);
      return {
        run,
        x: found.map((each) => each[state.x]),
        y: found.map((each) => each.value),
        low: hasBand ? end(0) : undefined,
        high: hasBand ? end(1) : undefined,
        isShare: found.every((each) => each.name === "accuracy"),
      };
    });
    return curves.filter((curve) => curve.x.length > 0);
  }

  draw(card) {
    const state = this.app.state;
    const isEvaluated = card.name.startsWith(HELD_OUT);
    const measured = (card.data ?? []).filter((curve) => isEvaluated || !this.isUnmeasured(card.name, curve));
    const left = (card.data ?? []).filter((curve) => !measured.includes(curve)).map((curve) => curve.run);
    fill(card.note, left.length > 0 ? `Not measured in ${left.join(", ")}: ${UNMEASURED}` : "");
    const curves = measured
      .filter((curve) => state.runs.includes(curve.run))
      .map((curve) => ({
        ...curve,
        label: curve.run,
        colour: this.app.colourOf(curve.run),
        unit: isStepped(state) ? 1 : (this.units.get(`${curve.run}|${state.x}`) ?? 1),
      }));
    card.shown = curves;
    const summary = state.runs.length === 1 ? this.summaries[0] : null;
    const chart = {
      curves,
      x_name: state.x,
      y_name: "",
      is_stepped: isStepped(state),
      has_marks: isEvaluated,
      phases: state.x === "step" ? (summary?.phases ?? []) : [],
      is_share: isEvaluated && curves.every((curve) => curve.isShare),
      is_log: card.name === "mismatch/logprob_gap/max",
    };
    const shown = card.chart.draw(chart, {
      ...drawn(state),
      height: card.name === state.wide ? HEIGHTS.wide : isLead(card.name) ? HEIGHTS.lead : HEIGHTS.usual,
    });
    fill(card.axisName, caption(AXES.find(([name]) => name === state.x)?.[1] ?? state.x, shown));
    this.hovered(card, null, null);
  }

  // What compares sampler and trainer says nothing where nothing was compared.
  isUnmeasured(name, curve) {
    if (!name.startsWith("mismatch/") || name.startsWith("mismatch/first_")) return false;
    const summary = this.summaries[this.app.state.runs.indexOf(curve.run)];
    return summary?.config?.["algorithm.old_logprobs"] === "sampler" || curve.y.every((value) => value === 0);
  }

  // Show the last values, or those under the pointer.
  hovered(card, values, x) {
    const curves = card.shown ?? [];
    const last = curves.map((curve) => number(curve.y.findLast((value) => value !== null)));
    const now = values ? values.map((each, place) => (each === null ? last[place] : number(each.y))) : last;
    const name = this.app.state.x;
    const first = values?.find((each) => each !== null);
    if (curves.length === 1) {
      fill(card.output, first ? reading(name, first.x, now) : now[0]);
      fill(card.legend);
      return;
    }
    fill(card.output, first ? reading(name, x, []).replace(": ", "") : "");
    fill(
      card.legend,
      curves.map((curve, place) =>
        el("span", { class: `key c${curve.colour % 8}` }, curve.run, " ", el("b", {}, now[place])),
      ),
    );
  }
}

// Whether x counts steps.
function isStepped(state) {
  return state.x === "step" || state.x === "phase";
}

// Whether a curve is one of those that matter most.
function isLead(name) {
  return name === HELD_OUT || name === "reward/score/mean";
}

function pointsOf(card, state) {
  return card.name === state.wide ? POINTS.wide : POINTS.usual;
}
