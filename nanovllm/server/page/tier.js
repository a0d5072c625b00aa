"use strict";

/* A pool on the page, the device's or the host's: a grid of squares, or a field where there are too many of them. */
class Tier {
  static MOST_SQUARES = 512;

  constructor(element, canvas, noun, choose) {
    this._squares = new Grid(element, noun, choose);
    this._field = new Field(canvas, noun, choose);
    this.parts = [this._squares, this._field];
    this.grid = this._squares; // the one that shows it now
  }

  /** `most` is the number of squares of the larger pool: a block is of one size, on the device and on the host. */
  shape(num_squares, noun, most = num_squares) {
    const isField = most > Tier.MOST_SQUARES, num_columns = most > 256 ? 32 : most > 64 ? 16 : 8;
    this.grid = isField ? this._field : this._squares;
    for (const part of this.parts) part.element.hidden = part !== this.grid;
    this._squares.element.classList.toggle("dense", num_columns > 16);
    this.grid.shape(num_squares, isField ? most : num_columns, noun);
  }

  show(cells, memory, selected, table) {
    this.grid.show(cells, memory, selected, table);
  }
}
