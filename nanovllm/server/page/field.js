"use strict";

/* A pool of thousands of blocks, painted on a canvas: squares as small as a few pixels, told apart by colour. It does
 * what a Grid does, but has no letters and no patterns: whose a block is, its panel says.
 */
class Field {
  constructor(canvas, noun, choose) {
    Object.assign(this, { element: canvas, noun, choose, num_squares: 0 });
    this.context = canvas.getContext("2d");
    this.squares = Dom.make("canvas").getContext("2d"); // without the outlines: only those that changed are painted
    this.painted = []; // the cells that it shows
    canvas.addEventListener("click", ({ offsetX, offsetY }) => this._click(offsetX, offsetY));
    canvas.addEventListener("keydown", (event) => this._key(event));
    new ResizeObserver(() => this._fit()).observe(canvas.parentElement);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
      this._clear();
      this._paint();
    });
  }

  /** Its squares are as small as a pool of `most` needs them. */
  shape(num_squares, most) {
    Object.assign(this, { num_squares, most });
    this._fit();
  }

  /** All squares fit in a square as wide as the column; on a long pool each has at least 3 pixels. */
  _fit() {
    const width = this.element.parentElement.clientWidth;
    if (!this.num_squares || !width) return;
    this.size = Math.min(14, Math.max(3, Math.floor(width / Math.ceil(Math.sqrt(this.most)))));
    this.num_columns = Math.floor(width / this.size);
    const height = Math.ceil(this.num_squares / this.num_columns) * this.size, scale = devicePixelRatio || 1;
    Object.assign(this.element, { width: width * scale, height: height * scale });
    Object.assign(this.element.style, { width: `${width}px`, height: `${height}px` });
    this.context.setTransform(scale, 0, 0, scale, 0, 0);
    Object.assign(this.squares.canvas, { width: width * scale, height: height * scale });
    this.squares.setTransform(scale, 0, 0, scale, 0, 0);
    this._clear();
    this._paint();
  }

  /** Every square is to be painted again. */
  _clear() {
    this.palette = null;
    this.painted = [];
  }

  show(cells, memory, selected, table = []) {
    Object.assign(this, { cells, memory, selected, table });
    const held = cells.filter(({ status }) => status === "held").length;
    const label = `${cells.length} ${this.noun}s, ${held} held. Arrow keys choose one.`;
    this.element.setAttribute("aria-label", label);
    this._paint();
  }

  /** The middle of a block's square, where an arrow begins or ends. */
  middle(block) {
    const { x, y } = this._place(block);
    return { x: x + this.size / 2, y: y + this.size / 2, room: this.size };
  }

  _place(block) {
    return { x: (block % this.num_columns) * this.size, y: Math.floor(block / this.num_columns) * this.size };
  }

  _paint() {
    if (!this.cells || !this.size) return;
    const { context, cells, painted, squares: { canvas } } = this;
    this.palette ??= Palette.read();
    for (const cell of cells) if (!Field.isSame(cell, painted[cell.block])) this._square(cell);
    this.painted = cells;
    context.clearRect(0, 0, canvas.width, canvas.height);
    context.drawImage(canvas, 0, 0, this.element.clientWidth, this.element.clientHeight);
    for (const { block, isTouched } of cells) if (isTouched) this._outline(block, this.palette.soft, 1);
    for (const block of this.table) this._outline(block, this.palette.ink, 1);
    if (this.selected !== null) this._outline(this.selected, this.palette.accent, 2);
  }

  /** Whether a square looks as it did: its outline lies over it. */
  static isSame(cell, before) {
    return before !== undefined && cell.status === before.status && cell.count === before.count
      && cell.bands[0]?.seq === before.bands[0]?.seq && cell.bands[0]?.filled === before.bands[0]?.filled
      && cell.origin?.seq === before.origin?.seq;
  }

  _square({ block, status, count, bands, origin }) {
    const { squares: context, palette } = this, { x, y } = this._place(block), side = this.size - 1;
    const seq = bands[0]?.seq ?? origin?.seq, colour = seq ? palette.of(this.memory, seq) : palette.line;
    context.clearRect(x, y, side, side);
    context.fillStyle = status === "free" ? palette.line : colour;
    context.globalAlpha = { held: 0.4, idle: 0.3, free: 0.55 }[status];
    context.fillRect(x, y, side, side);
    context.globalAlpha = 1;
    if (bands.length) context.fillRect(x, y, (side * bands[0].filled) / bands[0].to, side);
    context.fillStyle = palette.ink;
    if (count > 1 && side > 4) context.fillRect(x + side / 2 - 1, y + side / 2 - 1, 2, 2);
  }

  _outline(block, colour, width) {
    const { x, y } = this._place(block);
    Object.assign(this.context, { strokeStyle: colour, lineWidth: width });
    this.context.strokeRect(x - 0.5, y - 0.5, this.size, this.size);
  }

  _click(x, y) {
    const block = Math.floor(y / this.size) * this.num_columns + Math.floor(x / this.size);
    if (block < this.num_squares) this.choose(block);
  }

  _key(event) {
    const moves = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -this.num_columns, ArrowDown: this.num_columns };
    if (!(event.key in moves)) return;
    const next = (this.selected ?? -moves[event.key]) + moves[event.key];
    if (next >= 0 && next < this.num_squares) this.choose(next);
    event.preventDefault();
    event.stopPropagation(); // or an arrow would also move through time
  }
}

/* The colours of the style sheet, as a canvas needs them. */
const Palette = (() => {
  /** As they are now: light and dark differ. */
  function read() {
    const root = getComputedStyle(document.documentElement);
    const colour = (name) => [name, root.getPropertyValue(`--${name}`)];
    return { ...Object.fromEntries(["ink", "soft", "line", "accent"].map(colour)), of: ofSequences() };
  }

  function ofSequences() {
    const colours = {}, probe = Dom.make("span", { hidden: "" });
    return (memory, seq) => {
      Cast.dress(probe, memory, seq);
      const { hue, shade } = probe.dataset;
      return (colours[hue + shade] ??= lookUp(probe));
    };
  }

  function lookUp(probe) {
    document.body.append(probe);
    const colour = getComputedStyle(probe).getPropertyValue("--colour");
    probe.remove();
    return colour;
  }

  return { read };
})();
