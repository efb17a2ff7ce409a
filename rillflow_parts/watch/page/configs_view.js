// Configuration: the settings in which the chosen runs differ; of one run, every setting.

import { el, fill } from "./dom.js";
import { get } from "./api.js";

export class ConfigsView {
  constructor(app) {
    this.app = app;
    this.filter = el("input", {
      type: "search",
      placeholder: "part of a setting or value",
      "aria-label": "Filter the settings",
      input: (event) => app.change({ setting: event.target.value }, { isTyping: true }),
    });
    this.body = el("div", { class: "stack" });
    this.node = el(
      "div",
      {},
      el("div", { class: "controls" }, el("label", {}, el("span", {}, "Filter"), this.filter)),
      this.body,
    );
    this.key = "";
  }

  fail(told) {
    fill(this.body, el("section", { class: "card" }, told));
  }

  async update(state) {
    if (document.activeElement !== this.filter) this.filter.value = state.setting;
    const summaries = await Promise.all(state.runs.map((run) => this.app.summary(run)));
    const found = state.runs.length > 1 ? await this.differences(state.runs) : null;
    if (state !== this.app.state) return;
    fill(
      this.body,
      state.runs.length === 0
        ? el("p", { class: "empty" }, "No run is chosen.")
        : [
            found ? this.compared(found, state) : this.single(summaries[0], state),
            summaries.map((summary) => this.history(summary)),
          ],
    );
  }

  async differences(runs) {
    const key = runs.join();
    if (this.key !== key) [this.found, this.key] = [await get("configs", { runs }), key];
    return this.found;
  }

  compared(found, state) {
    const rows = found.differences.filter(({ key, values }) =>
      matches(state.setting, key, Object.values(values)),
    );
    const head = [
      "setting",
      ...state.runs.map((run) => el("span", { class: `key c${this.app.colourOf(run) % 8}` }, run)),
    ];
    const words = `${found.differences.length === 0 ? "No setting differs" : `${found.differences.length} differ`}; ${found.same} are the same.`;
    return settings(
      "Differences",
      words,
      head,
      rows.map(({ key, values }) => [key, ...state.runs.map((run) => shown(values[run]))]),
    );
  }

  single(summary, state) {
    const rows = Object.entries(summary.config ?? {}).filter(([key, value]) =>
      matches(state.setting, key, [value]),
    );
    return settings(
      `Settings of ${summary.run}`,
      "Choose a second run to see in what they differ.",
      ["setting", "value"],
      rows.map(([key, value]) => [key, shown(value)]),
    );
  }

  history(summary) {
    const starts = (summary.starts ?? []).map((start) => el("li", {}, describe(start)));
    const changes = (summary.changes ?? []).flatMap(({ after_step: after, changes: changed }) =>
      changed.map(({ key, old, new: now }) =>
        el("li", {}, `from step ${after + 1} on, ${key}: ${shown(old)} → ${shown(now)}`),
      ),
    );
    if (starts.length + changes.length === 0) return null;
    return el(
      "section",
      { class: "card" },
      el("h3", {}, summary.run),
      el("p", { class: "hint" }, "Starts"),
      el("ul", { class: "plain" }, starts),
      changes.length > 0
        ? [
            el("p", { class: "hint" }, "Settings that later starts changed"),
            el("ul", { class: "plain" }, changes),
          ]
        : null,
    );
  }
}

function matches(words, key, values) {
  return `${key} ${values.map(shown).join(" ")}`.toLowerCase().includes(words.toLowerCase());
}

function settings(title, hint, head, rows) {
  return el(
    "section",
    { class: "card" },
    el("h3", {}, title),
    el("p", { class: "hint" }, hint),
    rows.length > 0 &&
      el(
        "div",
        { class: "scroll", tabindex: 0 },
        el(
          "table",
          { class: "settings" },
          el(
            "thead",
            {},
            el(
              "tr",
              {},
              head.map((word) => el("th", {}, word)),
            ),
          ),
          el(
            "tbody",
            {},
            rows.map((row) =>
              el(
                "tr",
                {},
                row.map((cell) => el("td", {}, cell)),
              ),
            ),
          ),
        ),
      ),
  );
}

function shown(value) {
  return value === undefined || value === null
    ? "none"
    : typeof value === "string"
      ? value
      : JSON.stringify(value);
}

function describe(start) {
  const command = Array.isArray(start.command) ? start.command.join(" ") : "";
  const facts = [
    start.started,
    start.device && `${start.device}, ${start.cores} cores`,
    start.platform,
    command,
  ].filter(Boolean);
  return facts.length > 0 ? facts.join(" · ") : JSON.stringify(start);
}
