// Elements whose text cannot become markup: every string is a text node, never HTML.
//
//   el("p", { class: "note", title: "t" }, "1 < 2", el("b", {}, "x"))

const CONTROL = /\p{Cc}/gu;
const TURNING = /[\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]/gu;

// Replace control characters by symbols and text-direction controls by text like <U+202E>, as
// `visible` in runs/formatting.py does: text of a model could otherwise reorder what is shown.
export function visible(text) {
  return text.replace(CONTROL, picture).replace(TURNING, named);
}

function picture(character) {
  const code = character.charCodeAt(0);
  if (character === "\n" || character === "\t") return character;
  return code > 0x7f ? named(character) : String.fromCharCode(code === 0x7f ? 0x2421 : 0x2400 + code);
}

function named(character) {
  return `<U+${character.charCodeAt(0).toString(16).toUpperCase().padStart(4, "0")}>`;
}

// Return an element. Attributes that are null, undefined or false are left out, true gives an empty value,
// and a function is a listener: { click: show }. Children are nodes, texts, numbers, or lists of these.
export function el(tag, attributes, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (typeof value === "function") node.addEventListener(name, value);
    else node.setAttribute(name, value === true ? "" : visible(String(value)));
  }
  node.append(...nodes(children));
  return node;
}

// Replace everything inside a node.
export function fill(node, ...children) {
  node.replaceChildren(...nodes(children));
  return node;
}

function nodes(children) {
  return children
    .flat(Infinity)
    .filter((child) => child !== null && child !== undefined && child !== false)
    .map((child) => (child instanceof Node ? child : document.createTextNode(visible(String(child)))));
}

// Return a labelled control: the label's words, and the control inside it.
export function labelled(words, control) {
  return el("label", {}, el("span", {}, words), control);
}

// Return a select. Options are [value, words] pairs; `changed` receives the chosen value.
export function choice(options, chosen, changed, attributes = {}) {
  const control = el("select", { ...attributes, change: () => changed(control.value) });
  for (const [value, words] of options) {
    control.append(el("option", { value, selected: String(value) === String(chosen) }, words));
  }
  return control;
}
