"use strict";

/* The block table of the selected sequence, as arrows from block to block over the pool. */
class Arrows {
  static LEAST_ROOM = 8; // pixels a block: between smaller ones an arrow is only a blot

  constructor(...grids) {
    this.table = [];
    this.svg = Dom.svg("svg", { class: "arrows", "aria-hidden": "true" });
    this.svg.append(head());
    grids.at(-1).element.after(this.svg);
    const resized = new ResizeObserver(() => this.table.length && this.show(this.table, this.grid));
    for (const { element } of grids) resized.observe(element);
  }

  /** `grid` is the one that shows the pool now. */
  show(table, grid) {
    Object.assign(this, { table, grid });
    const middles = table.map((block) => grid.middle(block)), isFine = middles[0]?.room < Arrows.LEAST_ROOM;
    const lines = isFine ? [] : middles.slice(1).flatMap((middle, i) => line(middles[i], middle));
    this.svg.replaceChildren(this.svg.firstChild, ...lines);
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
