// The state of the page: everything that it shows is in the address, so a link opens exactly this view.

import { joinNames } from "./api.js";

const DEFAULTS = {
  view: "curves",
  runs: [], // the chosen runs; their order gives the colours
  run: "", // the run whose rollouts or timeline is shown; the first chosen one if empty
  // curves
  x: "step",
  span: "auto",
  axes: "",
  from: null,
  to: null,
  filter: "",
  wide: "",
  // configuration
  setting: "",
  // rollouts
  q: "",
  step: "",
  outcome: "",
  finish: "",
  reward_min: "",
  reward_max: "",
  sort: "-step",
  prompt: "",
  offset: 0,
  // one rollout
  at: "",
  epoch: "",
  sample: "",
  colour: "probability",
  // timeline
  first: "",
  last: "",
  scale: 1,
};
const NUMBERS = new Set(["from", "to", "offset", "scale"]);

// Return the state that an address names.
export function readState(address = location.search) {
  const given = new URLSearchParams(address);
  const state = { ...DEFAULTS };
  for (const name of Object.keys(DEFAULTS)) {
    if (!given.has(name)) continue;
    const text = given.get(name);
    if (name === "runs") state.runs = text.split(",").filter(Boolean).map(decoded);
    else if (name === "span") state.span = text === "auto" ? text : Number(text) || 0;
    else if (NUMBERS.has(name))
      state[name] = text !== "" && Number.isFinite(Number(text)) ? Number(text) : DEFAULTS[name];
    else state[name] = text;
  }
  return state;
}

// Return the address of a state; fields at their defaults are left out.
export function addressOf(state) {
  const kept = new URLSearchParams();
  for (const [name, plain] of Object.entries(DEFAULTS)) {
    const value = state[name];
    if (name === "runs" ? value.length > 0 : value !== plain) {
      kept.set(
        name,
        Array.isArray(value)
          ? joinNames(value)
          : ["from", "to"].includes(name)
            ? String(Number(value.toPrecision(6)))
            : String(value),
      );
    }
  }
  const query = kept.toString().replace(/%2C/g, ",").replaceAll("%2F", "/");
  return query ? `?${query}` : location.pathname;
}

// Return the state with every field of some views at its default, for a link from one view to another.
export function cleared(state, ...names) {
  return { ...state, ...Object.fromEntries(names.map((name) => [name, DEFAULTS[name]])) };
}

// Return a name as `joinNames` was given it; a text that someone typed may not be encoded.
function decoded(name) {
  try {
    return decodeURIComponent(name);
  } catch {
    return name;
  }
}
