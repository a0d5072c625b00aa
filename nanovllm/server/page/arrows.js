"use strict";

/* The block table of the selected sequence, as arrows from block to block over the grid. */
class Arrows {
  constructor(grid) {
    this.grid = grid;
    this.svg = Dom.svg("svg", { class: "arrows", "aria-hidden": "true" });
    const head = Dom.svg("marker", { id: "head", viewBox: "0 0 8 8", refX: 6.5, refY: 4, markerWidth: 7, markerHeight: 7, orient: "auto-start-reverse" });
    head.append(Dom.svg("path", { d: "M0 0 8 4 0 8z" }));
    this.svg.append(head);
    grid.element.after(this.svg);
    new ResizeObserver(() => this.show(this.table)).observe(grid.element);
    this.table = [];
  }

  show(table) {
    this.table = table;
    const lines = table.slice(1).flatMap((block, i) => this._line(this._middle(table[i]), this._middle(block)));
    this.svg.replaceChildren(this.svg.firstChild, ...lines);
  }

  _middle(block) {
    const { offsetLeft, offsetTop, offsetWidth, offsetHeight } = this.grid.squares[block];
    return { x: offsetLeft + offsetWidth / 2, y: offsetTop + offsetHeight / 2, room: offsetWidth };
  }

  /** A curve that bows a little to its left, so that there and back are two lines; on paper of its own, to be seen. */
  _line(a, b) {
    const [dx, dy] = [b.x - a.x, b.y - a.y], length = Math.hypot(dx, dy) || 1;
    const short = 0.3 * a.room; // it ends before the middle: letters stay free
    const [sx, sy, tx, ty] = [a.x + (dx / length) * short, a.y + (dy / length) * short, b.x - (dx / length) * short, b.y - (dy / length) * short];
    const bow = length > 1.5 * a.room ? 0.12 : 0;
    const [cx, cy] = [(a.x + b.x) / 2 + dy * bow, (a.y + b.y) / 2 - dx * bow];
    const d = `M${sx} ${sy}Q${cx} ${cy} ${tx} ${ty}`;
    return [Dom.svg("path", { d, class: "halo" }), Dom.svg("path", { d, class: "arrow", "marker-end": "url(#head)" })];
  }
}
