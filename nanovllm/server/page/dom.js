/* DOM helpers, and the look of a sequence everywhere on the page: its letter, color and pattern. */

import { requestOf } from "./reducer.js";

const NUM_COLORS = 8, NUM_SHADES = 3; // defined in pool.css; samples of one request are shades of one color

export const byId = (id) => document.getElementById(id);

/** Create an element: make("p", { class: "note" }, "text", child). Skip null attributes and null children. */
export function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "style") element.style.cssText = value; // the server's Content-Security-Policy forbids the attribute
    else if (value !== null) element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child !== null));
  return element;
}

export function makeSvg(tag, attributes = {}) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return element;
}

/** Replace the children of an element. */
export function fill(id, ...children) {
  byId(id).replaceChildren(...children.filter((child) => child !== null));
}

/** Return "F" for a request and "F2" for its second sample. */
export function label(memory, seq) {
  const request = requestOf(seq), sample = sampleOf(seq);
  const letter = request.length <= 2 ? request : letterOf(memory.places[request] ?? 0);
  return sample === null ? letter : letter + (sample + 1);
}

/** Give an element the color and the pattern of a sequence. */
export function setColor(element, memory, seq) {
  element.dataset.hue = (memory.places[requestOf(seq)] ?? 0) % NUM_COLORS;
  element.dataset.shade = (sampleOf(seq) ?? 0) % NUM_SHADES;
}

/** Create a sequence's letter, in its color and pattern. */
export function tag(memory, seq) {
  const element = make("span", { class: "tag" }, label(memory, seq));
  setColor(element, memory, seq);
  return element;
}

function sampleOf(seq) {
  const match = /\.(?:beam)?(\d+)$/.exec(seq);
  return match ? Number(match[1]) : null;
}

/** Return A to Z, then AA to ZZ, then A again. A server's request ids are too long for a square. */
function letterOf(place) {
  const i = place % (26 + 26 * 26), letter = (number) => String.fromCharCode(65 + number);
  return i < 26 ? letter(i) : letter(Math.floor(i / 26) - 1) + letter(i % 26);
}
