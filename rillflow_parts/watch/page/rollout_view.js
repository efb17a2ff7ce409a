// One rollout: its facts, every token coloured by a value, its columns, and the other rows of its group.

import { choice, el, fill, labelled } from "./dom.js";
import { counted, grouped, number } from "./numbers.js";
import { TERMS } from "./terms.js";
import { colourings, drawTokens } from "./tokens.js";
import { get } from "./api.js";
import { rewardBadge } from "./rollouts_view.js";

export class RolloutView {
  constructor(app) {
    this.app = app;
    this.node = el("div", { class: "stack" });
    this.key = "";
  }

  fail(told) {
    fill(this.node, el("section", { class: "card" }, told));
  }

  async update(state, { isLive = false }) {
    const wanted = {
      run: this.app.run,
      step: state.at,
      epoch: state.epoch,
      prompt: state.prompt,
      sample: state.sample,
    };
    const key = JSON.stringify(wanted);
    if (this.key !== key) [this.row, this.key] = [await get("rollout", wanted), key];
    else if (isLive) return;
    if (state !== this.app.state) return;
    fill(
      this.node,
      this.head(this.row, state),
      this.tokens(this.row, state),
      this.details(this.row),
      this.group(this.row, state),
    );
  }

  head(row, state) {
    const facts = [
      rewardBadge(row),
      el("span", {}, `step ${grouped(row.step)}`),
      el("span", { title: TERMS.row }, `epoch ${row.epoch}, prompt ${row.prompt}, sample ${row.sample}`),
      el("span", {}, counted(row.length ?? row.tokens.filter((each) => each.is_sampled).length, "token")),
      typeof row.advantage === "number" && el("span", { title: TERMS.advantage }, `advantage ${number(row.advantage)}`),
      typeof row.cost === "number" && el("span", {}, `cost ${number(row.cost)}`),
      row.finish &&
        el(
          "span",
          { class: row.finish === "length" ? "warn" : "" },
          row.finish === "length" ? "cut off at the limit" : `finish ${row.finish}`,
        ),
      this.app.link({ view: "prompt", prompt: state.prompt }, {}, "this prompt over time"),
      this.app.link({ view: "rollouts" }, {}, "back to the search"),
    ];
    return el(
      "section",
      { class: "card" },
      el("h3", {}, `Rollout of ${this.app.run}`),
      el("p", { class: "facts" }, facts),
      row.message && el("p", { class: "bad" }, row.message),
    );
  }

  tokens(row, state) {
    const output = el("p", { class: "token-reading", role: "status" });
    const options = colourings(row.tokens ?? [], row);
    const kind = options.some(([name]) => name === state.colour) ? state.colour : "probability";
    if ((row.tokens ?? []).length === 0) {
      return el(
        "section",
        { class: "card" },
        el("div", { class: "prompt" }, row.prompt_text ?? ""),
        el("div", { class: "answer" }, row.completion ?? ""),
      );
    }
    const { node, legend } = drawTokens(row.tokens, row, kind, output);
    const select = choice(options, kind, (colour) => this.app.change({ colour }));
    return el(
      "section",
      { class: "card" },
      el("div", { class: "controls" }, labelled("Colour tokens by", select)),
      legend,
      node,
      output,
    );
  }

  details(row) {
    const parts = Object.entries(row.parts ?? {}),
      columns = Object.entries(row.columns ?? {});
    const table = (title, rows) =>
      rows.length > 0 &&
      el(
        "section",
        { class: "card" },
        el("h3", {}, title),
        el(
          "div",
          { class: "scroll" },
          el(
            "table",
            { class: "settings" },
            el(
              "tbody",
              {},
              rows.map(([name, value]) =>
                el(
                  "tr",
                  {},
                  el("td", {}, name),
                  el("td", {}, typeof value === "string" ? value : JSON.stringify(value)),
                ),
              ),
            ),
          ),
        ),
      );
    return [table("Scores by reward function", parts), table("Other columns of the prompt", columns)];
  }

  group(row, state) {
    const rows = row.groups ?? [];
    if (rows.length === 0) return null;
    const where = (other) => ({ sample: String(other.sample), at: String(other.step ?? state.at) });
    return el(
      "section",
      { class: "card" },
      el("h3", {}, "The other answers of its group"),
      rows.map((other) =>
        el(
          "article",
          { class: "row" },
          el(
            "p",
            { class: "facts" },
            rewardBadge(other),
            this.app.link(where(other), {}, `sample ${other.sample}`),
            other.length !== undefined && el("span", {}, counted(other.length, "token")),
            typeof other.advantage === "number" && el("span", { title: TERMS.advantage }, `advantage ${number(other.advantage)}`),
          ),
          el("div", { class: "answer brief-text" }, other.completion ?? ""),
        ),
      ),
    );
  }
}
