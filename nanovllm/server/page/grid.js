"use strict";

/* A pool as a grid of squares. Squares are made once, and then changed: so a change can be seen, and focus stays.
 *
 * One square can be reached with Tab, the others from there with the arrow keys (a roving tabindex).
 */
class Grid {
  /** `choose(block)` is called when a square is clicked, or Enter is pressed on it. `noun`: "block", "host block". */
  constructor(element, noun, choose) {
    Object.assign(this, { element, noun, choose, squares: [] });
    element.addEventListener("click", ({ target }) => this._chosen(target.closest(".square")));
    element.addEventListener("keydown", (event) => this._key(event));
  }

  shape(num_squares, num_columns) {
    if (this.squares.length === num_squares && this.num_columns === num_columns) return;
    this.num_columns = num_columns;
    this.squares = Array.from({ length: num_squares }, () => Dom.make("div", { class: "square", role: "gridcell", tabindex: -1 }));
    this.squares[0].tabIndex = 0;
    const rows = [];
    for (let at = 0; at < num_squares; at += num_columns) {
      rows.push(Dom.make("div", { role: "row" }, ...this.squares.slice(at, at + num_columns)));
    }
    this.element.style.setProperty("--columns", num_columns);
    this.element.replaceChildren(...rows);
  }

  /** `table` maps a block to its place in the selected sequence's table. */
  show(cells, memory, selected, table = new Map()) {
    cells.forEach((cell, i) => {
      const square = this.squares[i];
      const looks = JSON.stringify([cell, cell.block === selected, table.get(i)]);
      if (square.looks === looks) return;
      square.looks = looks;
      paint(square, cell, memory);
      square.setAttribute("aria-label", this._spoken(cell, memory));
      square.setAttribute("aria-selected", cell.block === selected);
      square.classList.toggle("in-table", table.has(i));
      square.dataset.index = table.get(i) ?? "";
    });
  }

  _spoken({ block, status, bands, count, origin }, memory) {
    const holders = bands.map(({ seq, filled, from, to }) => `${Cast.label(memory, seq)}, ${filled} of ${to - from} slots filled`);
    const text = origin ? ` with a text of ${Cast.label(memory, origin.seq)}` : "";
    const what = { held: `held by ${holders.join("; ")}`, idle: `idle${text}`, free: "free" }[status];
    return `${this.noun} ${block}: ${what}${count > 1 ? `, ${count} holders` : ""}`;
  }

  _chosen(square) {
    if (!square) return;
    this._rove(square);
    this.choose(this.squares.indexOf(square));
  }

  _key(event) {
    const moves = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -this.num_columns, ArrowDown: this.num_columns };
    const at = this.squares.indexOf(event.target);
    if (event.key in moves && Grid.isByKeyboard) {
      const next = this.squares[at + moves[event.key]];
      if (next) this._rove(next).focus();
    } else if (event.key === "Enter" || (event.key === " " && Grid.isByKeyboard)) {
      this._chosen(event.target);
    } else return;
    event.preventDefault();
    event.stopPropagation(); // or the arrow would also move through time
  }

  _rove(square) {
    for (const each of this.squares) each.tabIndex = each === square ? 0 : -1;
    return square;
  }

  /** Whoever clicks a square goes on with the arrow keys through time; whoever came with Tab goes through the grid. */
  static isByKeyboard = false;
}

addEventListener("keydown", ({ key }) => { if (key === "Tab") Grid.isByKeyboard = true; }, true);
addEventListener("pointerdown", () => { Grid.isByKeyboard = false; }, true);

/** The inside of a square: a band for each holder, how much of it is filled, a letter, a count. */
function paint(square, { status, bands, count, origin, isTouched }, memory) {
  const isShared = count > 1 && bands.every(({ from }) => from === 0); // in stage 1 two pieces may lie side by side
  square.className = `square ${status}${isTouched ? " touched" : ""}`;
  const shown = bands.map((band, i) => paintBand(band, isShared ? [i, bands.length] : [0, 1], memory));
  if (status === "idle" && origin) {
    shown.push(Dom.make("span", { class: "ghost" }));
    Cast.dress(shown[0], memory, origin.seq);
  }
  if (bands.length && !isShared) bands.forEach(({ seq, from, to }, i) => { if (to - from > 2) shown[i].append(letter(Cast.label(memory, seq))); });
  if (isShared) shown.push(letter(together(bands, memory)), Dom.make("span", { class: "count" }, String(count)));
  square.replaceChildren(...shown);
}

function paintBand({ seq, from, to, filled }, [top, of], memory) {
  const band = Dom.make("span", { class: "band" }, Dom.make("span", { class: "fill" }));
  for (const [name, value] of Object.entries({ from, to, filled, top, of })) band.style.setProperty(`--${name}`, value);
  Cast.dress(band, memory, seq);
  return band;
}

const letter = (text) => Dom.make("span", { class: "letter" }, text);

/** Samples of one request are told by its letter, strangers by the first one's. */
function together(bands, memory) {
  const families = new Set(bands.map(({ seq }) => Memory.family(seq)));
  return families.size === 1 ? Cast.label(memory, [...families][0]) : `${Cast.label(memory, bands[0].seq)}+`;
}
