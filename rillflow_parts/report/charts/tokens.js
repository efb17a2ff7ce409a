// Tokens: draw a row token by token, coloured by a value of each token, with a legend and a reading of the value.
//
// A token is {text, is_sampled, logprob, version, ratio, advantage}; ratio and advantage only if recorded.

import { el, fill } from "./dom.js";
import { number } from "./numbers.js";

const SHADES = [0.9, 0.7, 0.5, 0.25, 0.1, 0.03]; // probabilities below which a token is one shade darker
const HINT = "Point at a token for its values, or go from token to token with the arrow keys.";
const NAMES = { probability: "probability", advantage: "advantage", ratio: "ratio", version: "version" };

// Return the ways in which the tokens can be coloured, as options of a select.
export function colourings(tokens, row) {
  const sampled = tokens.filter((each) => each.is_sampled);
  const known = { probability: true, version: true };
  known.advantage = isNumber(row.advantage) || sampled.some((each) => isNumber(each.advantage));
  known.ratio = sampled.some((each) => isNumber(each.ratio));
  return Object.entries(NAMES).filter(([name]) => known[name]);
}

// Return the row as {node, legend}: its tokens, those that were not sampled in grey, and what the colours mean.
export function drawTokens(tokens, row, kind, output) {
  const scale = scaleOf(tokens, row, kind);
  const first = tokens.findIndex((each) => each.is_sampled);
  const node = el("div", { class: "answer tokens", tabindex: 0, role: "group", "aria-label": "Tokens" });
  tokens.forEach((token, place) => {
    const shown = el(
      token.is_sampled ? "i" : "q",
      { "data-place": place },
      spelled(textOf(token), token.is_sampled),
    );
    if (token.is_sampled) scale.paint(shown, token);
    else shown.className = place < first ? "given" : "inserted";
    node.append(shown);
  });
  reading(node, tokens, row, output);
  return {
    node,
    legend: el(
      "p",
      { class: "legend" },
      el("span", {}, `${scale.title}:`),
      scale.keys(),
      el(
        "span",
        { class: "tokens" },
        el("q", {}, "grey"),
        ": not sampled, from the prompt, a tool or an environment",
      ),
    ),
  };
}

// A token without a known text is shown by its number.
function textOf(token) {
  return token.text ?? `⟨${token.id}⟩`;
}

function spelled(text, isSampled) {
  if (!isSampled) return text;
  return text.replace(/\n/g, "↵\n").replace(/\t/g, "⇥\t") || "·";
}

// Show the values of the token under the pointer, or of the one that the arrow keys reached.
function reading(node, tokens, row, output) {
  let place = null;
  const show = (next) => {
    if (place !== null) node.children[place]?.classList.remove("at");
    place = next;
    if (place !== null) node.children[place].classList.add("at");
    fill(output, place === null ? HINT : words(tokens[place], place, row));
  };
  fill(output, HINT);
  node.addEventListener(
    "pointerover",
    (event) => event.target.dataset.place && show(Number(event.target.dataset.place)),
  );
  node.addEventListener("pointerleave", () => show(null));
  node.addEventListener("keydown", (event) => {
    const move = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!move) return;
    event.preventDefault();
    show(
      Math.max(
        0,
        Math.min(
          tokens.length - 1,
          place === null ? tokens.findIndex((each) => each.is_sampled) : place + move,
        ),
      ),
    );
  });
}

function words(token, place, row) {
  const name = `token ${place + 1} ${JSON.stringify(textOf(token))}`;
  if (!token.is_sampled) return `${name}: not sampled`;
  const advantage = token.advantage ?? row.advantage;
  const parts = [
    `probability ${share(token.logprob)}`,
    `log probability ${number(token.logprob)}`,
    `version ${token.version}`,
  ];
  if (isNumber(advantage)) parts.push(`advantage ${number(advantage)}`);
  if (isNumber(token.ratio)) parts.push(`ratio ${number(token.ratio)}`);
  return `${name}: ${parts.join(", ")}`;
}

function share(logprob) {
  return isNumber(logprob) ? `${(100 * Math.exp(Math.min(0, logprob))).toPrecision(3)}%` : "not finite";
}

function isNumber(value) {
  return typeof value === "number" && Number.isFinite(value);
}

function scaleOf(tokens, row, kind) {
  const sampled = tokens.filter((each) => each.is_sampled);
  if (kind === "version") return versionScale(sampled);
  if (kind === "advantage")
    return signedScale("Advantage", sampled, (token) => token.advantage ?? row.advantage, 0);
  if (kind === "ratio") return signedScale("Ratio of trainer to sampler", sampled, (token) => token.ratio, 1);
  const level = (token) =>
    isNumber(token.logprob)
      ? SHADES.filter((limit) => Math.exp(Math.min(0, token.logprob)) < limit).length
      : SHADES.length;
  const names = ["over 90%", ...SHADES.map((limit) => `under ${100 * limit}%`)];
  return {
    title: "Probability when it was sampled",
    paint: (node, token) => node.classList.add(`s${level(token)}`),
    keys: () =>
      el(
        "span",
        { class: "tokens" },
        names.map((name, place) => el("i", { class: `s${place}` }, ` ${name} `)),
      ),
  };
}

// Green above the middle, red below; the furthest value of the row is darkest.
function signedScale(title, sampled, value, middle) {
  const most = Math.max(
    1e-12,
    ...sampled.map((token) => Math.abs((value(token) ?? middle) - middle)).filter(isNumber),
  );
  const shade = (amount) =>
    `rgba(var(--${amount >= 0 ? "up" : "down"}), ${(0.08 + 0.7 * Math.min(1, Math.abs(amount) / most)).toFixed(2)})`;
  const key = (amount) => {
    const node = el("i", {}, ` ${number(middle + amount)} `);
    node.style.background = amount === 0 ? "none" : shade(amount);
    return node;
  };
  return {
    title,
    paint: (node, token) => {
      const found = value(token);
      if (isNumber(found) && found !== middle) node.style.background = shade(found - middle);
    },
    keys: () => el("span", { class: "tokens" }, [-most, -most / 2, 0, most / 2, most].map(key)),
  };
}

function versionScale(sampled) {
  const versions = [...new Set(sampled.map((token) => token.version))].sort((a, b) => a - b);
  const tint = (version) => `hsl(${(versions.indexOf(version) * 137.5 + 195) % 360} 60% 50% / .3)`;
  const key = (version) => {
    const node = el("i", {}, ` ${version} `);
    node.style.background = tint(version);
    return node;
  };
  return {
    title: "Version of the weights that sampled it",
    paint: (node, token) => {
      node.style.background = tint(token.version);
    },
    keys: () =>
      el("span", { class: "tokens" }, versions.slice(0, 24).map(key), versions.length > 24 ? " …" : ""),
  };
}
