"use strict";

/* What a square can show in this stage, drawn as the grid itself is. */
const Legend = (() => {
  const EXAMPLE = { requests: ["A"], ended: {} };
  const band = (filled) => ({ seq: "A", index: 0, from: 0, to: 8, filled });

  function show(pool, { canShare, canCache, hasHost }) {
    const isSlots = pool.unit === "slots";
    const items = [
      [{ status: "held", bands: [band(5)] }, isSlots ? "8 slots of A's piece: 5 filled, 3 only reserved" : "held by A: 5 of 8 slots filled"],
      [{ status: "free", bands: [] }, isSlots ? "8 free slots" : "free"],
      [{ status: "held", bands: [band(8)], isTouched: true }, "outlined: moved in this step"],
      canShare && [{ status: "held", bands: [band(8)], count: 3 }, "the number: how many share it"],
      canCache && [{ status: "idle", bands: [], origin: { seq: "A", index: 0 } }, hasHost ? "idle, or on the host: nobody holds it, its text can be found" : "idle: nobody holds it, its text can be found"],
    ];
    Dom.byId("legend").replaceChildren(...items.filter(Boolean).map(([cell, words]) => {
      const square = Dom.make("span", { class: "square", "aria-hidden": "true", style: "--slots: 8" });
      paint(square, { count: 1, isTouched: false, origin: null, ...cell }, EXAMPLE);
      return Dom.make("li", {}, square, words);
    }));
  }

  return { show };
})();
