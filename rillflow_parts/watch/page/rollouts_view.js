// Rollouts: search and filter the sampled rows of one run, page by page.

import { choice, el, fill, labelled } from "./dom.js";
import { counted, duration, grouped, number } from "./numbers.js";
import { TERMS } from "./terms.js";
import { get } from "./api.js";
import { cleared } from "./state.js";

const LIMIT = 50;
const INDEXING_MS = 1500; // until a search is repeated whose run is not indexed to its last step
const SORTS = [
  ["-step", "newest step first"],
  ["step", "oldest step first"],
  ["-reward", "highest reward first"],
  ["reward", "lowest reward first"],
  ["-length", "longest first"],
  ["length", "shortest first"],
];
const OUTCOMES = [
  ["", "any"],
  ["score", "scored"],
  ["abstain", "abstained"],
  ["timeout", "timed out"],
  ["error", "failed"],
];
const FINISHES = [
  ["", "any"],
  ["stop", "ended"],
  ["length", "cut off at the limit"],
  ["aborted", "aborted"],
];

// Return the select of the run that a view shows, when several are chosen.
export function runChoice(app) {
  const runs = app.state.runs.includes(app.run) ? app.state.runs : [app.run, ...app.state.runs];
  return labelled(
    "Run",
    choice(
      runs.map((run) => [run, run]),
      app.run,
      (run) => app.change({ run, offset: 0 }),
    ),
  );
}

// Return the reward of a row as a badge, or its outcome.
export function rewardBadge(row) {
  if (row.reward === null || row.reward === undefined)
    return el("span", { class: "badge low" }, row.outcome || "not scored");
  return el("span", { class: `badge ${row.reward > 0 ? "high" : "low"}` }, `reward ${number(row.reward)}`);
}

// Return a text with its marked ranges.
export function marked(text, ranges) {
  const parts = [];
  let reached = 0;
  for (const [from, to] of ranges ?? []) {
    if (from < reached) continue;
    parts.push(text.slice(reached, from), el("mark", {}, text.slice(from, to)));
    reached = to;
  }
  return [...parts, text.slice(reached)];
}

export class RolloutsView {
  constructor(app) {
    this.app = app;
    this.form = el("form", { class: "controls", role: "search", submit: (event) => this.search(event) });
    this.told = el("p", { class: "hint", role: "status" });
    this.rows = el("div", { class: "stack" });
    this.pages = el("nav", { class: "controls", "aria-label": "Pages" });
    this.node = el("div", {}, this.form, this.told, this.rows, this.pages);
  }

  fail(told) {
    fill(this.told);
    fill(this.rows, el("section", { class: "card" }, told));
    fill(this.pages);
  }

  async update(state, { isLive = false }) {
    if (isLive) {
      this.tellNew();
      return;
    }
    this.showForm(state);
    this.aborting?.abort();
    this.aborting = new AbortController();
    if (!this.app.run) return this.fail(["No run is chosen."]);
    this.rows.setAttribute("aria-busy", "true");
    const found = await get(
      "rollouts",
      { ...parametersOf(state), run: this.app.run, offset: state.offset, limit: LIMIT },
      this.aborting.signal,
    );
    this.rows.removeAttribute("aria-busy");
    this.steps = this.stepsNow();
    const total = `${found.is_total_exact === false ? "at least " : ""}${counted(found.total, "row")}`;
    const { to_step: done, of_step: whole } = found.indexed ?? {};
    fill(
      this.told,
      `${total}, found in ${duration(found.took_s)}`,
      done < whole && `; indexed to step ${grouped(done)} of ${grouped(whole)}`,
    );
    fill(
      this.rows,
      found.rows.length > 0
        ? found.rows.map((row) => this.item(row))
        : el("p", { class: "empty" }, "No row matches."),
    );
    this.showPages(state, found);
    clearTimeout(this.waiting);
    if (done < whole)
      this.waiting = setTimeout(() => state === this.app.state && this.app.update({}), INDEXING_MS);
  }

  close() {
    clearTimeout(this.waiting);
    this.aborting?.abort();
  }

  stepsNow() {
    return this.app.runs.find((each) => each.run === this.app.run)?.steps ?? 0;
  }

  // A page that someone reads stays as it is; a button shows the newer rows.
  tellNew() {
    if (this.stepsNow() <= (this.steps ?? 0)) return;
    const button = el(
      "button",
      { type: "button", click: () => this.app.change({ offset: 0 }) },
      `Step ${grouped(this.stepsNow())} is done: search again`,
    );
    if (!this.told.querySelector("button")) this.told.append(" ");
    this.told.querySelector("button")?.remove();
    this.told.append(button);
  }

  showForm(state) {
    const field = (name, attributes) => {
      const input = el("input", { name, ...attributes });
      input.value = state[name];
      return input;
    };
    const select = (name, options) =>
      choice(options, state[name], (value) => this.app.change({ [name]: value, offset: 0 }), { name });
    const focused = this.form.contains(document.activeElement) ? document.activeElement.name : "";
    const isFiltered = ["q", "step", "outcome", "finish", "reward_min", "reward_max", "prompt"].some(
      (name) => state[name] !== "",
    );
    fill(
      this.form,
      runChoice(this.app),
      labelled("Text", field("q", { type: "search", placeholder: "in prompt or answer" })),
      labelled("Steps", field("step", { size: 9, placeholder: "such as 10-20", pattern: "\\d*-?\\d*" })),
      labelled("Outcome", select("outcome", OUTCOMES)),
      labelled("End", select("finish", FINISHES)),
      el(
        "span",
        { class: "range" },
        labelled("Reward from", field("reward_min", { type: "number", step: "any" })),
        labelled("to", field("reward_max", { type: "number", step: "any" })),
      ),
      labelled("Prompt", field("prompt", { size: 6, placeholder: "number" })),
      labelled("Order", select("sort", SORTS)),
      el("button", { type: "submit" }, "Search"),
      isFiltered &&
        this.app.link(
          cleared(
            { view: "rollouts" },
            "q",
            "step",
            "outcome",
            "finish",
            "reward_min",
            "reward_max",
            "prompt",
            "offset",
          ),
          {},
          "clear",
        ),
    );
    if (focused) this.form.elements[focused]?.focus();
  }

  search(event) {
    event.preventDefault();
    const given = Object.fromEntries(new FormData(this.form));
    this.app.change({ ...given, offset: 0 });
  }

  item(row) {
    const where = {
      view: "rollout",
      run: this.app.run,
      at: String(row.step),
      epoch: String(row.epoch),
      prompt: String(row.prompt),
      sample: String(row.sample),
    };
    const versions =
      row.version_min === row.version_max
        ? `version ${row.version_min}`
        : `versions ${row.version_min} to ${row.version_max}`;
    return el(
      "article",
      { class: "card row" },
      el(
        "p",
        { class: "facts" },
        rewardBadge(row),
        this.app.link(where, { title: TERMS.row }, `step ${grouped(row.step)}, prompt ${row.prompt}, sample ${row.sample}`),
        el("span", {}, counted(row.length, "token")),
        typeof row.advantage === "number" && el("span", { title: TERMS.advantage }, `advantage ${number(row.advantage)}`),
        row.version_min !== null && el("span", { title: TERMS.version }, versions),
        row.finish === "length" && el("span", { class: "warn" }, "cut off at the limit"),
        this.app.link(
          { view: "prompt", run: this.app.run, prompt: String(row.prompt) },
          {},
          "this prompt over time",
        ),
      ),
      el("div", { class: "prompt brief-text" }, marked(row.prompt_text, row.prompt_marks)),
      el("div", { class: "answer brief-text" }, marked(row.completion, row.marks)),
    );
  }

  showPages(state, found) {
    const last = state.offset + found.rows.length;
    const page = (words, offset, isThere) =>
      isThere
        ? this.app.link({ offset }, { class: "button" }, words)
        : el("span", { class: "button off" }, words);
    fill(
      this.pages,
      found.rows.length > 0 && [
        page("Previous", Math.max(0, state.offset - LIMIT), state.offset > 0),
        el("span", {}, `${grouped(state.offset + 1)} to ${grouped(last)}`),
        page(
          "Next",
          state.offset + LIMIT,
          last < found.total || (found.is_total_exact === false && found.rows.length === LIMIT),
        ),
      ],
    );
  }
}

function parametersOf(state) {
  const names = ["q", "step", "outcome", "finish", "reward_min", "reward_max", "sort", "prompt"];
  return Object.fromEntries(names.map((name) => [name, state[name]]));
}
