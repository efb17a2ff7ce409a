// The page: the list of runs, the views, and the state in the address.
//
//   address ─ readState ─> state ─ View.update ─> requests ─> drawn
//   a control, link or drag ─ app.change ─> address ─> the same way
//   server-sent events ─ a run has grown ─> View.update with isLive

import { el, fill } from "./dom.js";
import { get, joinNames } from "./api.js";
import { ConfigsView } from "./configs_view.js";
import { CurvesView } from "./curves_view.js";
import { PromptView } from "./prompt_view.js";
import { RolloutView } from "./rollout_view.js";
import { RolloutsView } from "./rollouts_view.js";
import { RunList } from "./run_list.js";
import { addressOf, cleared, readState } from "./state.js";
import { TimelineView } from "./timeline_view.js";

const VIEWS = {
  curves: CurvesView,
  configs: ConfigsView,
  rollouts: RolloutsView,
  rollout: RolloutView,
  prompt: PromptView,
  timeline: TimelineView,
};
const TABS = { curves: "Curves", configs: "Configuration", rollouts: "Rollouts", timeline: "Timeline" };
const PART_OF = { rollout: "rollouts", prompt: "rollouts" };
const LIVE_MS = 1000; // least time between two live updates
const LOOK_MS = 5000; // time between two looks for new runs

class App {
  constructor() {
    this.state = readState();
    this.summaries = new Map();
    this.runs = [];
    this.view = null;
    this.hasFailed = false;
    this.main = document.getElementById("main");
    this.list = new RunList(document.getElementById("runs"), this);
    history.replaceState(null, "", addressOf(this.state)); // leaves out the token
    addEventListener("popstate", () => this.show(readState()));
  }

  async start() {
    try {
      this.runs = await get("runs");
    } catch (error) {
      this.fail(error);
      return;
    }
    if (matchMedia("(max-width: 760px)").matches) document.getElementById("side").open = false;
    this.show(this.withRun(this.state));
    setInterval(() => this.look(), LOOK_MS);
  }

  // Return a state that shows at least one run, the newest.
  withRun(state) {
    const newest = [...this.runs].sort((one, other) =>
      (one.updated ?? "") < (other.updated ?? "") ? 1 : -1,
    )[0];
    return state.runs.length === 0 && newest ? { ...state, runs: [newest.run] } : state;
  }

  // Look for new runs, and try again what has failed: a run may be too new, or its index not be complete.
  async look() {
    if (document.hidden) return;
    const isFirst = this.runs.length === 0;
    this.runs = await get("runs").catch(() => this.runs);
    if (isFirst && this.runs.length > 0) this.show(this.withRun(this.state));
    else this.list.show();
    if (this.events?.readyState === EventSource.CLOSED) this.listen();
    if (this.hasFailed) this.update({});
  }

  // Change the state, as a new entry of the history; while someone types, in place of the last one.
  change(fields, { isTyping = false } = {}) {
    const state = { ...this.state, ...fields };
    const address = addressOf(state);
    if (address !== addressOf(this.state))
      history[isTyping ? "replaceState" : "pushState"](null, "", address);
    this.show(state);
  }

  // Return a link to this state with other fields.
  link(fields, attributes, ...children) {
    const state = { ...this.state, ...fields };
    const follow = (event) => {
      if (event.ctrlKey || event.metaKey || event.shiftKey || event.button !== 0) return;
      event.preventDefault();
      this.change(fields);
    };
    return el("a", { ...attributes, href: addressOf(state), click: follow }, ...children);
  }

  // The run of the views that show one run.
  get run() {
    return this.state.run || this.state.runs[0] || "";
  }

  colourOf(run) {
    return Math.max(0, this.state.runs.indexOf(run));
  }

  // Return the summary of a run; it is asked for again when the run has grown.
  summary(run) {
    if (!this.summaries.has(run)) {
      const found = get(`runs/${encodeURIComponent(run)}`);
      found.catch(() => this.summaries.delete(run));
      this.summaries.set(run, found);
    }
    return this.summaries.get(run);
  }

  show(state) {
    const isOther = this.state.view !== state.view || !this.view;
    const areOthers = this.state.runs.join() !== state.runs.join() || !this.events;
    this.state = VIEWS[state.view] ? state : { ...state, view: "curves" };
    if (isOther || !this.main.contains(this.view.node)) {
      this.view?.close?.();
      this.view = new VIEWS[this.state.view](this);
      fill(this.main, this.view.node);
      scrollTo(0, 0);
    }
    this.list.show();
    this.showTabs();
    if (areOthers) this.listen();
    this.update({});
  }

  async update(how) {
    if (this.runs.length === 0) {
      fill(
        this.main,
        el("p", { class: "empty" }, "There is no run yet. This page shows it as soon as it starts."),
      );
      return;
    }
    const view = this.view;
    try {
      await view.update(this.state, how);
      this.hasFailed = false;
    } catch (error) {
      if (error.name !== "AbortError" && view === this.view) this.fail(error);
    }
  }

  fail(error) {
    this.hasFailed = true;
    const told = [
      el("p", { class: "bad" }, error.message),
      el("p", { class: "hint" }, error.why ?? ""),
      el("p", {}, error.fix ?? ""),
    ];
    if (this.view?.fail) this.view.fail(told);
    else fill(this.main, el("section", { class: "card error" }, told));
  }

  showTabs() {
    const now = PART_OF[this.state.view] ?? this.state.view;
    const links = Object.entries(TABS).map(([view, words]) =>
      this.link(cleared({ view }, "offset"), { "aria-current": view === now ? "page" : null }, words),
    );
    fill(document.getElementById("views"), links);
    document.title = `${[TABS[now], ...this.state.runs].join(" · ")} · Rillflow`;
  }

  // Return why no news come: a link may name runs that are not here, or the server has ended.
  whyNotLive() {
    const known = new Set(this.runs.map((each) => each.run));
    const unknown = this.state.runs.filter((run) => !known.has(run));
    if (unknown.length > 0) return `no run ${unknown.join(", ")} here`;
    return "not connected: the server does not answer";
  }

  // Hear of the chosen runs' new steps. Events that come fast are answered once a second.
  listen() {
    this.events?.close();
    const source = new EventSource(`/api/events?runs=${encodeURIComponent(joinNames(this.state.runs))}`);
    const live = document.getElementById("live");
    let waiting = null;
    source.onopen = () => fill(live, el("span", { class: "dot-live" }), "live");
    source.onerror = () => fill(live, this.whyNotLive());
    source.onmessage = (event) => {
      const { run } = JSON.parse(event.data);
      this.summaries.delete(run);
      waiting ??= setTimeout(async () => {
        waiting = null;
        this.runs = await get("runs").catch(() => this.runs);
        this.list.show();
        this.update({ isLive: true });
      }, LIVE_MS);
    };
    this.events = source;
  }
}

new App().start();
