/* The pool on the page: squares with the arrows of a block table over them, a legend that explains the squares, and a
 * bar that shows how much of the pool is promised, held and used. cells.js computes the cells.
 */

import { SLOTS_PER_SQUARE } from "./cells.js";
import { byId, fill, label, make, makeSvg, setColor } from "./dom.js";
import { requestOf } from "./reducer.js";

const MAX_SQUARES = 512; // a larger pool is painted on a canvas
const MIN_ARROW_SIZE = 8; // pixels per block; between smaller blocks, an arrow would be a blot

/** A pool of the device or the host: a Grid, or a Field if it has too many blocks for one. */
export class Tier {
  constructor(element, canvas, noun, choose) {
    this.grid = new Grid(element, noun, choose);
    this.field = new Field(canvas, noun, choose);
    this.shown = this.grid;
  }

  /** `max_squares` is the size of the larger tier: a block has the same size on the device and on the host. */
  shape(num_squares, noun, max_squares = num_squares) {
    const isField = max_squares > MAX_SQUARES, num_columns = max_squares > 256 ? 32 : max_squares > 64 ? 16 : 8;
    this.shown = isField ? this.field : this.grid;
    for (const part of [this.grid, this.field]) part.element.hidden = part !== this.shown;
    this.grid.element.classList.toggle("dense", num_columns > 16);
    if (isField) this.field.shape(num_squares, max_squares);
    else this.grid.shape(num_squares, num_columns, noun);
  }

  /** `table` is the block table of the selected sequence. */
  show(cells, memory, selected, table = []) {
    this.shown.show(cells, memory, selected, table);
  }
}

// ---- a grid of squares

let isTabbing = false; // true if the keyboard moved the focus
addEventListener("keydown", ({ key }) => { if (key === "Tab") isTabbing = true; }, true);
addEventListener("pointerdown", () => { isTabbing = false; }, true);

/** A pool as a grid of squares. They are created once and then updated, so that changes are animated and focus is kept.
 *
 * Tab reaches one square, and the arrow keys reach the others from there (a roving tabindex). After a click on a
 * square, the arrow keys still move through time.
 */
class Grid {
  /** `noun` names a square; `choose(block)` is called for a click or for Enter. */
  constructor(element, noun, choose) {
    Object.assign(this, { element, noun, choose, squares: [] });
    element.addEventListener("click", ({ target }) => this.chooseSquare(target.closest(".square")));
    element.addEventListener("keydown", (event) => this.onKey(event));
  }

  shape(num_squares, num_columns, noun) {
    this.noun = noun;
    if (this.squares.length === num_squares && this.num_columns === num_columns) return;
    this.num_columns = num_columns;
    const square = () => make("div", { class: "square", role: "gridcell", tabindex: -1 });
    this.squares = Array.from({ length: num_squares }, square);
    this.squares[0].tabIndex = 0;
    const rows = [];
    for (let i = 0; i < num_squares; i += num_columns) {
      rows.push(make("div", { role: "row" }, ...this.squares.slice(i, i + num_columns)));
    }
    this.element.style.setProperty("--columns", num_columns);
    this.element.replaceChildren(...rows);
  }

  show(cells, memory, selected, table) {
    const places = new Map(table.map((block, place) => [block, place]));
    cells.forEach((cell, block) => {
      const square = this.squares[block], isSelected = block === selected, place = places.get(block) ?? "";
      const looks = JSON.stringify([{ ...cell, origin: cell.origin?.seq }, isSelected, place, this.noun]);
      if (square.looks === looks) return;
      square.looks = looks;
      paintSquare(square, cell, memory, this.noun.startsWith("slots") ? block * SLOTS_PER_SQUARE : block);
      square.setAttribute("aria-label", `${this.noun} ${block}: ${describe(cell, memory)}`);
      square.setAttribute("aria-selected", isSelected);
      square.classList.toggle("in-table", place !== "");
      square.dataset.place = place;
    });
  }

  /** Return where an arrow begins or ends. */
  middle(block) {
    const { offsetLeft, offsetTop, offsetWidth, offsetHeight } = this.squares[block];
    return { x: offsetLeft + offsetWidth / 2, y: offsetTop + offsetHeight * 0.74, size: offsetWidth };
  }

  /** Return the boxes of the letters and of the numbers of places in a table, in pixels from the grid's corner. */
  nameBoxes() {
    const { left, top } = this.element.getBoundingClientRect(), place = (box) => Math.min(19, 0.48 * box.width);
    const boxOf = (x, y, width, height) => ({ x: x - left, y: y - top, width, height });
    const letters = [...this.element.querySelectorAll(".letter")].map((each) => each.getBoundingClientRect());
    const squares = [...this.element.querySelectorAll(".in-table")].map((each) => each.getBoundingClientRect());
    return [...letters.map((box) => boxOf(box.left, box.top, box.width, box.height)),
      ...squares.map((box) => boxOf(box.right - place(box) - 3, box.top, place(box) + 3, place(box) + 3))];
  }

  chooseSquare(square) {
    if (!square) return;
    this.rove(square);
    this.choose(this.squares.indexOf(square));
  }

  onKey(event) {
    if (!isTabbing) return;
    const moves = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -this.num_columns, ArrowDown: this.num_columns };
    const next = this.squares[this.squares.indexOf(event.target) + moves[event.key]];
    if (event.key in moves) this.rove(next ?? event.target).focus();
    else if (event.key === "Enter" || event.key === " ") this.chooseSquare(event.target);
    else return;
    event.preventDefault();
    event.stopPropagation(); // the page's own arrow keys move through time
  }

  rove(square) {
    for (const each of this.squares) each.tabIndex = each === square ? 0 : -1;
    return square;
  }
}

/** Paint a square: a band per holder, filled as far as its slots are written, a letter, and the number of holders. */
function paintSquare(square, { status, bands, count, origin, isTouched, isMarked }, memory, number = null) {
  const isShared = count > 1 && bands.every(({ from }) => from === 0); // stage 1's pieces are side by side instead
  const children = bands.map((band, i) => makeBand(band, isShared ? [i, bands.length] : [0, 1], memory));
  if (status === "idle") children.push(makeGhost(origin, memory));
  if (number !== null) children.push(make("span", { class: "number", "data-number": number }));
  if (isShared) children.push(makeLetter(sharedLabel(bands, memory)), make("span", { class: "count" }, String(count)));
  else bands.forEach(({ seq, from, to }, i) => {
    if (to - from > 2) children[i].append(makeLetter(label(memory, seq)));
  });
  square.className = `square ${status}${isTouched ? " touched" : ""}${isMarked ? " marked" : ""}`;
  square.replaceChildren(...children);
}

/** Create a band in row `top` of `of` rows, because the holders of a shared block are stacked. */
function makeBand({ seq, from, to, filled }, [top, of], memory) {
  const band = make("span", { class: "band" }, make("span", { class: "fill" }));
  const numbers = { from, to, filled, top, of };
  for (const [name, value] of Object.entries(numbers)) band.style.setProperty(`--${name}`, value);
  setColor(band, memory, seq);
  return band;
}

/** Create the ghost of an idle block's text. The page may not have seen which sequence computed it. */
function makeGhost(origin, memory) {
  const ghost = make("span", { class: "ghost" });
  if (!origin) return ghost;
  setColor(ghost, memory, origin.seq);
  ghost.append(makeLetter(label(memory, origin.seq)));
  return ghost;
}

/** Create a letter. The style sheet fits it into its square by its width in ems, since a W is wider than an I. */
const makeLetter = (text) => make("span", { class: "letter", style: `--ems:${widthOf(text)}` }, text);

const ruler = make("canvas").getContext("2d"), widths = {};

function widthOf(text) {
  if (!ruler.font.startsWith("650")) ruler.font = `650 100px ${getComputedStyle(document.body).fontFamily}`;
  return (widths[text] ??= ruler.measureText(text).width / 100);
}

/** Return the request's letter if all holders are its samples, else the first holder's letter and a plus sign. */
function sharedLabel(bands, memory) {
  const requests = new Set(bands.map(({ seq }) => requestOf(seq)));
  return requests.size === 1 ? label(memory, [...requests][0]) : `${label(memory, bands[0].seq)}+`;
}

/** Describe a cell to a screen reader. */
function describe({ status, bands, count, origin }, memory) {
  const holders = bands.map(({ seq, filled, from, to }) => (
    `${label(memory, seq)}, ${filled} of ${to - from} slots filled`));
  const text = origin ? `, computed by ${label(memory, origin.seq)}` : "";
  const words = { held: `held by ${holders.join("; ")}`, idle: `idle${text}`, free: "free" }[status];
  return count > 1 ? `${words}, ${count} holders` : words;
}

// ---- a field of thousands of blocks

/** A pool painted on a canvas: squares of a few pixels that show only colors. It is used like a Grid. */
export class Field {
  constructor(canvas, noun, choose) {
    Object.assign(this, { element: canvas, noun, choose, num_squares: 0 });
    this.context = canvas.getContext("2d");
    this.squares = make("canvas").getContext("2d"); // without outlines, so only squares that changed are painted again
    this.painted = []; // the cells on it
    canvas.addEventListener("click", ({ offsetX, offsetY }) => this.onClick(offsetX, offsetY));
    canvas.addEventListener("keydown", (event) => this.onKey(event));
    new ResizeObserver(() => this.fit()).observe(canvas.parentElement);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
      this.clear();
      this.paint();
    });
  }

  /** Make the squares small enough for a pool of `max_squares`. */
  shape(num_squares, max_squares) {
    Object.assign(this, { num_squares, max_squares });
    this.fit();
  }

  /** Fit the squares into a square as wide as the column. In a large pool each one still gets 3 pixels. */
  fit() {
    const width = this.element.parentElement.clientWidth;
    if (!this.num_squares || !width) return;
    this.size = Math.min(14, Math.max(3, Math.floor(width / Math.ceil(Math.sqrt(this.max_squares)))));
    this.num_columns = Math.floor(width / this.size);
    const height = Math.ceil(this.num_squares / this.num_columns) * this.size, scale = devicePixelRatio || 1;
    Object.assign(this.element.style, { width: `${width}px`, height: `${height}px` });
    for (const context of [this.context, this.squares]) {
      Object.assign(context.canvas, { width: width * scale, height: height * scale });
      context.setTransform(scale, 0, 0, scale, 0, 0);
    }
    this.clear();
    this.paint();
  }

  /** Paint every square again next time. */
  clear() {
    this.palette = null;
    this.painted = [];
  }

  show(cells, memory, selected, table = []) {
    Object.assign(this, { cells, memory, selected, table });
    const num_held = cells.filter(({ status }) => status === "held").length;
    const words = `${cells.length} ${this.noun}s, ${num_held} held. Arrow keys choose one.`;
    this.element.setAttribute("aria-label", words);
    this.paint();
  }

  middle(block) {
    const { x, y } = this.corner(block);
    return { x: x + this.size / 2, y: y + this.size / 2, size: this.size };
  }

  nameBoxes() {
    return []; // a field has colors only
  }

  corner(block) {
    return { x: (block % this.num_columns) * this.size, y: Math.floor(block / this.num_columns) * this.size };
  }

  paint() {
    if (!this.cells || !this.size) return;
    const { context, cells, painted, squares: { canvas } } = this;
    this.palette ??= readPalette();
    for (const cell of cells) if (!looksLike(cell, painted[cell.block])) this.paintSquare(cell);
    this.painted = cells;
    context.clearRect(0, 0, canvas.width, canvas.height);
    context.drawImage(canvas, 0, 0, this.element.clientWidth, this.element.clientHeight);
    for (const { block, isTouched } of cells) if (isTouched) this.outline(block, this.palette.soft, 1);
    for (const block of this.table) this.outline(block, this.palette.ink, 1);
    if (this.selected !== null) this.outline(this.selected, this.palette.accent, 2);
  }

  paintSquare({ block, status, count, bands, origin }) {
    const { squares: context, palette } = this, { x, y } = this.corner(block), side = this.size - 1;
    const seq = bands[0]?.seq ?? origin?.seq, color = seq ? palette.colorOf(this.memory, seq) : palette.line;
    context.clearRect(x, y, side, side);
    context.fillStyle = status === "free" ? palette.line : color;
    context.globalAlpha = { held: 0.4, idle: 0.3, free: 0.55 }[status];
    context.fillRect(x, y, side, side);
    context.globalAlpha = 1;
    if (bands.length) context.fillRect(x, y, (side * bands[0].filled) / bands[0].to, side);
    context.fillStyle = palette.ink;
    if (count > 1 && side > 4) context.fillRect(x + side / 2 - 1, y + side / 2 - 1, 2, 2);
  }

  outline(block, color, width) {
    const { x, y } = this.corner(block);
    Object.assign(this.context, { strokeStyle: color, lineWidth: width });
    this.context.strokeRect(x - 0.5, y - 0.5, this.size, this.size);
  }

  onClick(x, y) {
    const block = Math.floor(y / this.size) * this.num_columns + Math.floor(x / this.size);
    if (block < this.num_squares) this.choose(block);
  }

  onKey(event) {
    const moves = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -this.num_columns, ArrowDown: this.num_columns };
    if (!(event.key in moves)) return;
    const next = (this.selected ?? -moves[event.key]) + moves[event.key];
    if (next >= 0 && next < this.num_squares) this.choose(next);
    event.preventDefault();
    event.stopPropagation(); // the page's own arrow keys move through time
  }
}

/** Return true if two cells are painted alike, apart from outlines, which are painted over the squares. */
function looksLike(cell, before) {
  return before !== undefined && cell.status === before.status && cell.count === before.count
    && cell.bands[0]?.seq === before.bands[0]?.seq && cell.bands[0]?.filled === before.bands[0]?.filled
    && cell.origin?.seq === before.origin?.seq;
}

/** Read the style sheet's current colors for a canvas. They differ between light and dark mode. */
function readPalette() {
  const root = getComputedStyle(document.documentElement), colors = {}, probe = make("span", { hidden: "" });
  const colorOf = (memory, seq) => {
    setColor(probe, memory, seq);
    const { hue, shade } = probe.dataset;
    return (colors[hue + shade] ??= readColor(probe));
  };
  const named = ["ink", "soft", "line", "accent"].map((name) => [name, root.getPropertyValue(`--${name}`)]);
  return { ...Object.fromEntries(named), colorOf };
}

function readColor(probe) {
  document.body.append(probe);
  const color = getComputedStyle(probe).getPropertyValue("--color");
  probe.remove();
  return color;
}

// ---- arrows

const EVERYWHERE = { x: -100, y: -100, width: 10_000, height: 10_000 };

/** The block table of the selected sequence, as arrows from block to block over a tier. They pass behind the names. */
export class Arrows {
  constructor(tier) {
    Object.assign(this, { tier, table: [] });
    this.svg = makeSvg("svg", { class: "arrows", "aria-hidden": "true" });
    this.svg.append(makeArrowhead(), makeSvg("mask", { id: "names", maskUnits: "userSpaceOnUse", ...EVERYWHERE }));
    tier.field.element.after(this.svg);
    const observer = new ResizeObserver(() => this.table.length && this.show(this.table));
    for (const { element } of [tier.grid, tier.field]) observer.observe(element);
  }

  show(table) {
    this.table = table;
    const middles = table.map((block) => this.tier.shown.middle(block)), isTooSmall = middles[0]?.size < MIN_ARROW_SIZE;
    const arrows = isTooSmall ? [] : middles.slice(1).flatMap((middle, i) => makeArrow(middles[i], middle));
    const [head, mask] = this.svg.children, shown = makeSvg("g", { mask: "url(#names)" });
    shown.append(...arrows);
    const names = arrows.length ? this.tier.shown.nameBoxes() : [];
    mask.replaceChildren(makeSvg("rect", { ...EVERYWHERE, fill: "white" }), ...names.map((box) => makeSvg("rect", box)));
    this.svg.replaceChildren(head, mask, shown);
  }
}

/** Create an arrow with a halo that keeps it visible on any color. It bends to its left, so there and back differ. */
function makeArrow(a, b) {
  const dx = b.x - a.x, dy = b.y - a.y, length = Math.hypot(dx, dy) || 1;
  const [x, y] = [(0.14 * a.size * dx) / length, (0.14 * a.size * dy) / length]; // arrows there and back begin side by side
  const bow = length > 1.5 * a.size ? 0.12 : 0;
  const middle = `${(a.x + b.x) / 2 + dy * bow} ${(a.y + b.y) / 2 - dx * bow}`;
  const d = `M${a.x + x} ${a.y + y}Q${middle} ${b.x - x} ${b.y - y}`;
  return [makeSvg("path", { d, class: "halo" }), makeSvg("path", { d, class: "arrow", "marker-end": "url(#head)" })];
}

function makeArrowhead() {
  const size = { viewBox: "0 0 8 8", refX: 6.5, refY: 4, markerWidth: 7, markerHeight: 7 };
  const marker = makeSvg("marker", { id: "head", ...size, orient: "auto" });
  marker.append(makeSvg("path", { d: "M0 0 8 4 0 8z" }));
  return marker;
}

// ---- legend and meter

/** Explain the looks that a square can have in this run. */
export function showLegend(tape) {
  const isSlots = tape.snapshot.pool.unit === "slots", canShare = tape.has("shared") || tape.has("hit");
  const idle = tape.snapshot.host ? "idle, or on the host" : "idle";
  const filled = tape.snapshot.pool.block_size === 8 ? "5 of 8 slots filled" : "how full it is";
  const origin = { seq: "A", index: 0 };
  const plain = { status: "held", bands: [], count: 1, origin: null, isTouched: false };
  const held = (slots) => ({ ...plain, bands: [{ ...origin, from: 0, to: 8, filled: slots }] });
  fill("legend",
    makeLegendItem(held(5), isSlots ? "8 slots of A's piece: 5 filled, 3 only reserved" : `held by A: ${filled}`),
    makeLegendItem({ ...plain, status: "free" }, isSlots ? "8 free slots" : "free"),
    makeLegendItem({ ...held(8), isTouched: true }, "outlined: changed in this step"),
    canShare ? makeLegendItem({ ...held(8), count: 3 }, "in a dark circle: how many sequences share it") : null,
    tape.has("cached")
      ? makeLegendItem({ ...plain, status: "idle", origin }, `${idle}: no sequence holds it, but it is still cached`) : null);
}

function makeLegendItem(cell, words) {
  const square = make("span", { "aria-hidden": "true", style: "--slots: 8" });
  paintSquare(square, cell, { places: { A: 0 } });
  return make("li", {}, square, words);
}

/** Show promised, held and used slots as a bar as long as the pool. From stage 4 on, promises may exceed the pool. */
export function showMeter({ all, promised, held, used }) {
  const share = (slots) => `${Math.min(100, (100 * slots) / all).toFixed(2)}%`;
  const key = (name, text) => make("span", { class: `key ${name}` }, `${name} ${text}`);
  const words = `${used} slots used, ${held} held, ${promised} promised, of ${all}`;
  fill("meter",
    make("div", { class: "bar", role: "img", "aria-label": words },
      make("span", { class: "held", style: `width:${share(held)}` }),
      make("span", { class: "used", style: `width:${share(used)}` }),
      make("span", { class: "promised", style: `left:${share(promised)}` })),
    make("p", { "aria-hidden": "true" }, key("used", used), key("held", held), make("span", {}, `of ${all} slots`)),
    make("p", { "aria-hidden": "true" }, key("promised", `${promised}, if all reach their limits`)));
}
