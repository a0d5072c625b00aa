"use strict";

/* What a square can show in this stage, drawn as the grid itself is. */
const Legend = (() => {
  const NOBODY = { places: { A: 0 } };
  const PLAIN = { status: "held", count: 1, origin: null, isTouched: false };
  const held = (filled, more) => ({ ...PLAIN, bands: [{ seq: "A", index: 0, from: 0, to: 8, filled }], ...more });
  const EMPTY = { ...held(0), status: "free", bands: [] };
  const IDLE = { ...EMPTY, status: "idle", origin: { seq: "A", index: 0 } };

  function show(tape) {
    const isSlots = tape.snapshot.pool.unit === "slots", canShare = tape.has("shared") || tape.has("hit");
    const idle = tape.snapshot.host ? "idle, or on the host: nobody holds it" : "idle: nobody holds it";
    const filled = tape.snapshot.pool.block_size === 8 ? "5 of 8 slots filled" : "how full it is";
    Dom.fill("legend",
      item(held(5), isSlots ? "8 slots of A's piece: 5 filled, 3 only reserved" : `held by A: ${filled}`),
      item(EMPTY, isSlots ? "8 free slots" : "free"),
      item(held(8, { isTouched: true }), "outlined: changed hands in this step"),
      canShare ? item(held(8, { count: 3 }), "the number: how many share it") : null,
      tape.has("cached") ? item(IDLE, `${idle}, its text can be found`) : null);
  }

  function item(cell, words) {
    const square = Dom.make("span", { "aria-hidden": "true", style: "--slots: 8" });
    Square.paint(square, cell, NOBODY);
    return Dom.make("li", {}, square, words);
  }

  return { show };
})();
