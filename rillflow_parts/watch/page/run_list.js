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
    this.groups = el("div", { class: "all-runs" });
    this.items = el("ul", { class: "runs" });
    root.append(this.filter, this.groups, this.items);
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
    fill(this.groups, this.ticks(runs.filter(isFound)));
    if (focused) this.items.querySelector(`[data-run="${CSS.escape(focused)}"]`)?.focus();
  }

  // Return a tick for all runs of the list, and one for the seeds of each case of a sweep.
  ticks(found) {
    const cases = new Map();
    for (const { run } of found) {
      const above = caseOf(run);
      if (above) cases.set(above, [...(cases.get(above) ?? []), run]);
    }
    const groups = [...cases].filter(([, runs]) => runs.length > 1);
    const all = found.length > 1 ? [["all", found.map((each) => each.run)]] : [];
    return [...all, ...groups].map(([name, runs]) => this.tick(name, runs));
  }

  tick(name, runs) {
    const box = el("input", { type: "checkbox", change: () => this.chooseAll(runs, box.checked) });
    box.checked = runs.every((run) => this.app.state.runs.includes(run));
    return el("label", {}, box, ` ${name === "all" ? name : `${name}: ${runs.length} seeds`}`);
  }

  chooseAll(runs, isChosen) {
    const others = this.app.state.runs.filter((each) => !runs.includes(each));
    this.app.change({ runs: isChosen ? [...others, ...runs] : others });
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
            { class: "headline" },
            `${run.headline.name} `,
            el("b", {}, `${number(run.headline.value)}${interval(run.headline.interval)}`),
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

// Return the case of a seed's run in a sweep, such as "lr=1e-4" of "sweep/lr=1e-4/seed-0"; empty for others.
function caseOf(run) {
  const parts = run.split("/");
  return /^seed-\d+$/.test(parts.at(-1)) ? parts.slice(0, -1).join("/") : "";
}

function interval(ends) {
  return ends ? ` [${number(ends[0])}, ${number(ends[1])}]` : "";
}
