// The list of runs: choose those that the views show side by side.

import { el, fill } from "./dom.js";
import { grouped, number } from "./numbers.js";

const MANY = 8; // runs from which on the list has a filter

export class RunList {
  constructor(root, app) {
    this.app = app;
    this.words = "";
    this.filter = el("input", {
      type: "search",
      placeholder: "part of a name",
      "aria-label": "Filter the runs",
      input: (event) => {
        this.words = event.target.value.toLowerCase();
        this.show();
      },
    });
    this.items = el("ul", { class: "runs" });
    root.append(this.filter, this.items);
  }

  show() {
    const { runs, state } = this.app;
    this.filter.hidden = runs.length < MANY;
    const focused = document.activeElement?.dataset?.run;
    const isFound = (run) =>
      `${run.run} ${run.recipe ?? ""} ${run.algorithm ?? ""}`.toLowerCase().includes(this.words);
    const chosen = state.runs.map((name) => runs.find((run) => run.run === name)).filter(Boolean);
    const others = runs.filter((run) => !chosen.includes(run) && isFound(run));
    others.sort((one, other) => ((one.updated ?? "") < (other.updated ?? "") ? 1 : -1));
    const shown = [...chosen, ...others];
    fill(
      this.items,
      shown.map((run) => this.item(run, state.runs.includes(run.run))),
    );
    if (focused) this.items.querySelector(`[data-run="${CSS.escape(focused)}"]`)?.focus();
  }

  item(run, isChosen) {
    const box = el("input", {
      type: "checkbox",
      "data-run": run.run,
      change: () => this.choose(run.run, box.checked),
    });
    box.checked = isChosen;
    const of = run.of_steps && run.of_steps !== run.steps ? ` of ${grouped(run.of_steps)}` : "";
    const colour = isChosen ? `key c${this.app.colourOf(run.run) % 8}` : "";
    return el(
      "li",
      { class: isChosen ? "chosen" : "", title: run.path },
      el("label", {}, box, el("span", { class: `run-name ${colour}` }, run.run)),
      el(
        "small",
        {},
        el("span", { class: `state ${run.state}` }, run.state),
        ` · ${grouped(run.steps)}${of} steps`,
        run.algorithm ? ` · ${run.algorithm}` : "",
      ),
      (run.problems ?? []).map((problem) => el("small", { class: "bad", title: problem }, problem)),
      run.headline
        ? el(
            "small",
            {},
            `${run.headline.name} ${number(run.headline.value)}${interval(run.headline.interval)}`,
          )
        : null,
    );
  }

  choose(run, isChosen) {
    const others = this.app.state.runs.filter((each) => each !== run);
    this.app.change({
      runs: isChosen ? [...others, run] : others,
      ...(this.app.state.run === run && !isChosen ? { run: "" } : {}),
    });
  }
}

function interval(ends) {
  return ends ? ` [${number(ends[0])}, ${number(ends[1])}]` : "";
}
