"use strict";

/* The block table of the selected sequence, as arrows from block to block over the grid. */
class Arrows {
  constructor(grid) {
    this.grid = grid;
    this.table = [];
    this.svg = Dom.svg("svg", { class: "arrows", "aria-hidden": "true" });
    this.svg.append(head());
    grid.element.after(this.svg);
    new ResizeObserver(() => this.show(this.table)).observe(grid.element);
  }

  show(table) {
    this.table = table;
    const lines = table.slice(1).flatMap((block, i) => line(this._middle(table[i]), this._middle(block)));
    this.svg.replaceChildren(this.svg.firstChild, ...lines);
  }

  _middle(block) {
    const { offsetLeft, offsetTop, offsetWidth, offsetHeight } = this.grid.squares[block];
    return { x: offsetLeft + offsetWidth / 2, y: offsetTop + offsetHeight * 0.68, room: offsetWidth };
  }
}

/** A curve that bows a little to its left: there and back are two lines. It lies on paper, to be seen on any colour. */
function line(a, b) {
  const dx = b.x - a.x, dy = b.y - a.y, length = Math.hypot(dx, dy) || 1;
  const [x, y] = [(0.3 * a.room * dx) / length, (0.3 * a.room * dy) / length]; // it ends short of the letters
  const bow = length > 1.5 * a.room ? 0.12 : 0;
  const middle = `${(a.x + b.x) / 2 + dy * bow} ${(a.y + b.y) / 2 - dx * bow}`;
  const d = `M${a.x + x} ${a.y + y}Q${middle} ${b.x - x} ${b.y - y}`;
  return [Dom.svg("path", { d, class: "halo" }), Dom.svg("path", { d, class: "arrow", "marker-end": "url(#head)" })];
}

function head() {
  const size = { viewBox: "0 0 8 8", refX: 6.5, refY: 4, markerWidth: 7, markerHeight: 7 };
  const marker = Dom.svg("marker", { id: "head", ...size, orient: "auto" });
  marker.append(Dom.svg("path", { d: "M0 0 8 4 0 8z" }));
  return marker;
}
