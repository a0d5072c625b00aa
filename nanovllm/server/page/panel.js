"use strict";

/* The block that the reader clicked: who holds it, its text, its last moves, and the function that moved it. */
const Panel = (() => {
  const MOVES = 3; // told of a block, the latest first
  const QUIET = ["cached", "free", "idle"]; // told, but not what a reader means by "why did it move"

  /** `block` is a number, or "h3" of the host. `sources` maps the name of a function to {file, line, text}. */
  function show(tape, step, block, cell, sources, pool) {
    const frame = tape.frameAt(step), { memory } = frame;
    const moves = lastMoves(tape, step, block, pool);
    const main = moves.find(({ event }) => !QUIET.includes(event.kind)) ?? moves[0];
    const parts = [
      Dom.make("h2", {}, title(block, pool), ...holders(cell).map((seq) => Dom.tag(memory, seq))),
      Dom.make("p", { class: "facts" }, facts(cell, block, memory, pool)),
      text(frame, cell, pool),
      Dom.make("h3", {}, "Why it moved"),
      moves.length ? Dom.make("ol", { class: "moves" }, ...moves.map((move) => line(move, memory))) : Dom.make("p", { class: "facts" }, "It has not moved yet."),
      main && sources[main.event.by] ? source(main.event.by, sources[main.event.by]) : null,
    ];
    Dom.byId("panel").replaceChildren(...parts.filter((part) => part !== null));
  }

  function hint() {
    Dom.byId("panel").replaceChildren(Dom.make("p", { class: "hint" }, "Click a square: who holds it, its words, and the code that moved it."));
  }

  const isHost = (block) => String(block).startsWith("h");
  const holders = (cell) => [...new Set(cell.bands.map(({ seq }) => seq))];

  function title(block, pool) {
    if (isHost(block)) return `Host block ${block.slice(1)}`;
    const first = block * Cells.SLOTS_A_CELL;
    return pool.unit === "slots" ? `Slots ${first} to ${first + Cells.SLOTS_A_CELL - 1}` : `Block ${block}`;
  }

  function facts({ status, bands, count, origin }, block, memory, pool) {
    if (isHost(block)) return origin ? `A text of ${Cast.label(memory, origin.seq)}, evicted from the device.` : "Free.";
    if (status === "free") return "Free: nobody holds it, and nothing in it is of use.";
    if (status === "idle") return "Idle: nobody holds it, but its text can be found again.";
    if (pool.unit === "slots") return bands.map(({ seq, from, to, filled }) => `${Cast.label(memory, seq)}: ${filled} of ${to - from} slots filled`).join("; ") + ".";
    const [{ index, filled }] = bands, most = Math.max(...bands.map((band) => band.filled));
    const held = count > 1 ? `Held by ${count} sequences` : "Held by one sequence";
    return `${held}. Place ${index} in its table: tokens ${index * pool.block_size + 1} to ${(index + 1) * pool.block_size}, ${most} computed.`;
  }

  /** Its tokens, a box a slot. */
  function text(frame, { bands, origin, from }, pool) {
    const size = pool.unit === "slots" ? Cells.SLOTS_A_CELL : pool.block_size;
    const [band] = bands, place = band ?? origin;
    if (!place) return null;
    const rows = (band ? uniqueTexts(frame, bands, pool) : [wordsOf(frame, origin, size, size)]);
    return Dom.make("div", { class: "texts" }, ...rows);
  }

  function uniqueTexts(frame, bands, pool) {
    const rows = bands.map((band) => {
      const { slots } = frame.state.sequences[band.seq];
      if (!slots) return wordsOf(frame, band, band.filled, pool.block_size);
      const start = (Math.floor(slots[0] / Cells.SLOTS_A_CELL) + band.index) * Cells.SLOTS_A_CELL + band.from - slots[0];
      return row(Memory.textsOf(frame, band.seq, start, start + band.filled), band.to - band.from);
    });
    const seen = new Set();
    return rows.filter(({ textContent }) => !seen.has(textContent) && seen.add(textContent));
  }

  function wordsOf(frame, { seq, index }, filled, size) {
    return row(Memory.textsOf(frame, seq, index * size, index * size + filled), size);
  }

  function row(texts, size) {
    const boxes = Array.from({ length: size }, (_, i) => Dom.make("span", { class: i < texts.length ? "token" : "token empty" }, visible(texts[i] ?? "")));
    return Dom.make("p", { class: "tokens" }, ...boxes);
  }

  const visible = (piece) => piece.replaceAll("\n", "⏎").replace(/^ /, "·") || " ";

  function lastMoves(tape, step, block, pool) {
    const found = [];
    for (let at = step; at > 0 && found.length < MOVES; at -= 1) {
      const events = tape.eventsOf(at).filter((event) => names(event, block, pool));
      found.push(...events.reverse().map((event) => ({ event, at })));
    }
    return found.slice(0, MOVES);
  }

  function names(event, block, pool) {
    const { kind, from, to } = event;
    if (isHost(block)) {
      const number = Number(block.slice(1));
      if (kind === "stored" || kind === "renewed") return to === number;
      if (kind === "loaded" || kind === "arrived") return from === number;
      return kind === "host_evicted" && event.block === number;
    }
    if (kind === "copied") return from === block || to === block;
    if (kind === "stored") return from === block;
    if (kind === "loaded" || kind === "arrived") return to === block;
    if (pool.unit === "slots" && "start" in event && kind !== "chunk") {
      return event.start < (block + 1) * Cells.SLOTS_A_CELL && event.end > block * Cells.SLOTS_A_CELL;
    }
    return event.block === block && kind !== "host_evicted";
  }

  function line({ event, at }, memory) {
    return Dom.make("li", {}, Dom.make("span", { class: "at" }, `step ${at}`), `${Words.ofEvent(event, memory)}.`.replace(/^./, (letter) => letter.toUpperCase()));
  }

  function source(name, { file, line, text }) {
    return Dom.make("figure", {}, Dom.make("figcaption", {}, Dom.make("b", {}, name), ` ${file}:${line}`), Dom.make("pre", { tabindex: 0 }, text));
  }

  return { show, hint };
})();
