// Timeline: what each rank did in some steps of one run.

import { choice, el, fill, labelled } from "./dom.js";
import { duration } from "./numbers.js";
import { drawLanes } from "./lanes.js";
import { get } from "./api.js";
import { runChoice } from "./rollouts_view.js";

const LAST = 4; // steps that are shown at first
const SCALES = [
  [1, "whole width"],
  [2, "2 times"],
  [4, "4 times"],
  [8, "8 times"],
  [16, "16 times"],
  [32, "32 times"],
];

export class TimelineView {
  constructor(app) {
    this.app = app;
    this.head = el("div", { class: "controls" });
    this.body = el("section", { class: "card" });
    this.node = el("div", {}, this.head, this.body);
  }

  fail(told) {
    fill(this.body, told);
  }

  async update(state, { isLive = false }) {
    const steps = this.app.runs.find((each) => each.run === this.app.run)?.steps ?? 0;
    if (isLive && state.last !== "") return;
    const last = Number(state.last) || steps,
      first = Number(state.first) || Math.max(1, last - LAST + 1);
    this.showHead(state, first, last);
    if (steps === 0) return this.fail([el("p", { class: "empty" }, "No step is done yet.")]);
    const found = await get("timeline", { run: this.app.run, from: first, to: last });
    if (state !== this.app.state) return;
    fill(
      this.body,
      el("h3", {}, first === last ? `Step ${last}` : `Steps ${first} to ${last}`),
      el(
        "p",
        { class: "hint" },
        `${duration(found.end_s - found.start_s)} in all. A grey bar names what it waits for.`,
      ),
      found.lanes.length > 0
        ? drawLanes(found, state.scale)
        : el("p", { class: "empty" }, "No stage was recorded in these steps."),
    );
  }

  showHead(state, first, last) {
    const focused = document.activeElement?.name;
    const field = (name, value) => {
      const input = el("input", {
        type: "number",
        min: 1,
        name,
        change: () => this.app.change({ [name]: input.value }),
      });
      input.value = value;
      return input;
    };
    fill(
      this.head,
      runChoice(this.app),
      el(
        "span",
        { class: "range" },
        labelled("Steps", field("first", first)),
        labelled("to", field("last", last)),
      ),
      labelled(
        "Width",
        choice(SCALES, state.scale, (scale) => this.app.change({ scale: Number(scale) })),
      ),
    );
    if (focused) this.head.querySelector(`[name="${CSS.escape(focused)}"]`)?.focus();
  }
}
