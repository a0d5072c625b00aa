"use strict";

/* A pool as a grid of squares. Squares are made once, and then changed: so a change can be seen, and focus stays.
 *
 * One square is reached with Tab, the others from there with the arrow keys (a roving tabindex). But whoever clicks a
 * square goes on with the arrow keys through time, as before.
 */
class Grid {
  /** `noun` is what a square is called; `choose(block)` is called when it is clicked, or Enter is pressed on it. */
  constructor(element, noun, choose) {
    Object.assign(this, { element, noun, choose, squares: [] });
    element.addEventListener("click", ({ target }) => this._choose(target.closest(".square")));
    element.addEventListener("keydown", (event) => this._key(event));
  }

  shape(num_squares, num_columns, noun) {
    this.noun = noun;
    if (this.squares.length === num_squares && this.num_columns === num_columns) return;
    this.num_columns = num_columns;
    const square = () => Dom.make("div", { class: "square", role: "gridcell", tabindex: -1 });
    this.squares = Array.from({ length: num_squares }, square);
    this.squares[0].tabIndex = 0;
    const rows = [];
    for (let at = 0; at < num_squares; at += num_columns) {
      rows.push(Dom.make("div", { role: "row" }, ...this.squares.slice(at, at + num_columns)));
    }
    this.element.style.setProperty("--columns", num_columns);
    this.element.replaceChildren(...rows);
  }

  /** `table` is the selected sequence's: its blocks are marked with their places. */
  show(cells, memory, selected, table = []) {
    const places = new Map(table.map((block, place) => [block, place]));
    cells.forEach((cell, block) => {
      const square = this.squares[block], isSelected = block === selected, place = places.get(block) ?? "";
      const looks = JSON.stringify([{ ...cell, origin: cell.origin?.seq }, isSelected, place, this.noun]);
      if (square.looks === looks) return;
      square.looks = looks;
      Square.paint(square, cell, memory);
      square.setAttribute("aria-label", `${this.noun} ${block}: ${Square.inWords(cell, memory)}`);
      square.setAttribute("aria-selected", isSelected);
      square.classList.toggle("in-table", place !== "");
      square.dataset.place = place;
    });
  }

  /** Where an arrow begins or ends. */
  middle(block) {
    const { offsetLeft, offsetTop, offsetWidth, offsetHeight } = this.squares[block];
    return { x: offsetLeft + offsetWidth / 2, y: offsetTop + offsetHeight * 0.68, room: offsetWidth };
  }

  _choose(square) {
    if (!square) return;
    this._rove(square);
    this.choose(this.squares.indexOf(square));
  }

  _key(event) {
    if (!Grid.isByKeyboard) return;
    const moves = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -this.num_columns, ArrowDown: this.num_columns };
    const next = this.squares[this.squares.indexOf(event.target) + moves[event.key]];
    if (event.key in moves) this._rove(next ?? event.target).focus();
    else if (event.key === "Enter" || event.key === " ") this._choose(event.target);
    else return;
    event.preventDefault();
    event.stopPropagation(); // or an arrow would also move through time
  }

  _rove(square) {
    for (const each of this.squares) each.tabIndex = each === square ? 0 : -1;
    return square;
  }

  static isByKeyboard = false; // whether the focus came with Tab
}

addEventListener("keydown", ({ key }) => { if (key === "Tab") Grid.isByKeyboard = true; }, true);
addEventListener("pointerdown", () => { Grid.isByKeyboard = false; }, true);
