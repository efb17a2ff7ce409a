// One prompt over time: the rewards of its answers as a curve, and the answers step by step.

import { Chart } from "./chart.js";
import { el, fill } from "./dom.js";
import { counted, grouped } from "./numbers.js";
import { get } from "./api.js";
import { rewardBadge, runChoice } from "./rollouts_view.js";

const SHOWN = 20; // steps at each end, before "all steps" is asked for

export class PromptView {
  constructor(app) {
    this.app = app;
    this.head = el("div", { class: "controls" });
    this.box = el("div", { class: "chart" });
    this.chart = new Chart(this.box, { zoom: (from, to) => app.change({ from, to }) });
    this.text = el("div", { class: "prompt" });
    this.curve = el(
      "section",
      { class: "card" },
      el("h3", {}, "Reward of its answers"),
      el(
        "p",
        { class: "hint" },
        "Mean of each step; the band reaches from the lowest to the highest answer.",
      ),
      el("figure", {}, this.box, el("figcaption", { class: "axis-x" }, "step")),
    );
    this.list = el("div", { class: "stack" });
    this.node = el(
      "div",
      { class: "stack" },
      this.head,
      el("section", { class: "card" }, this.text),
      this.curve,
      this.list,
    );
    this.key = "";
  }

  close() {
    this.chart.destroy();
  }

  fail(told) {
    fill(this.list, el("section", { class: "card" }, told));
  }

  async update(state, { isLive = false }) {
    const key = `${this.app.run}|${state.prompt}`;
    if (this.key !== key || isLive) {
      this.found = await get("prompt", { run: this.app.run, epoch: "*", prompt: state.prompt });
      this.isWhole = this.key === key && this.isWhole;
      this.key = key;
    }
    if (state !== this.app.state) return;
    fill(
      this.head,
      runChoice(this.app),
      el("span", {}, `prompt ${state.prompt}`),
      this.app.link({ view: "rollouts" }, {}, "search its answers"),
    );
    fill(this.text, this.found.prompt_text);
    const curve = rewards(this.found.steps, this.app.colourOf(this.app.run));
    this.curve.hidden = curve.x.length < 2;
    if (!this.curve.hidden)
      this.chart.draw(
        {
          curves: [curve],
          x_name: "step",
          y_name: "reward",
          is_stepped: true,
          has_marks: curve.x.length < 200,
        },
        { span: 0, from: state.from, to: state.to },
      );
    this.showSteps(this.found.steps);
  }

  showSteps(steps) {
    const newest = [...steps].reverse();
    const isCut = !this.isWhole && newest.length > 2 * SHOWN;
    const all = el(
      "button",
      {
        type: "button",
        click: () => {
          this.isWhole = true;
          this.showSteps(steps);
        },
      },
      `Show all ${grouped(newest.length)} steps`,
    );
    const shown = isCut ? [...newest.slice(0, SHOWN), null, ...newest.slice(-SHOWN)] : newest;
    fill(
      this.list,
      shown.map((step) => (step ? this.step(step) : all)),
      steps.length === 0 && el("p", { class: "empty" }, "No step has kept an answer to this prompt."),
    );
  }

  step({ step, epoch, rows }) {
    const link = (row) => ({
      view: "rollout",
      at: String(step),
      epoch: String(row.epoch ?? epoch ?? ""),
      sample: String(row.sample),
    });
    return el(
      "section",
      { class: "card" },
      el("h3", {}, `Step ${grouped(step)}`),
      rows.map((row) =>
        el(
          "article",
          { class: "row" },
          el(
            "p",
            { class: "facts" },
            rewardBadge(row),
            this.app.link(link(row), {}, `sample ${row.sample}`),
            el("span", {}, counted(row.length, "token")),
          ),
          el("div", { class: "answer brief-text" }, row.completion),
        ),
      ),
    );
  }
}

function rewards(steps, colour) {
  const known = steps
    .map(({ step, rows }) => ({
      step,
      values: rows.map((row) => row.reward).filter((value) => typeof value === "number"),
    }))
    .filter(({ values }) => values.length > 0);
  return {
    label: "mean reward",
    colour,
    unit: 1,
    x: known.map(({ step }) => step),
    y: known.map(({ values }) => values.reduce((sum, value) => sum + value, 0) / values.length),
    low: known.map(({ values }) => Math.min(...values)),
    high: known.map(({ values }) => Math.max(...values)),
  };
}
