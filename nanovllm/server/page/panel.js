"use strict";

/* The block that the reader chose: who holds it, its text, its last moves in order, and the function that moved it. */
const Panel = (() => {
  const NUM_MOVES = 3;
  const QUIET = ["cached", "free", "idle"]; // told too, but no answer to "who has it, and why?"

  /** A run's `sources` map the name of a function to {file, line, text}. */
  function show({ tape, sources }, step, block, cell) {
    const at = Math.min(step, tape.length), frame = tape.frameAt(at), { memory } = frame;
    const moves = Moves.last(tape, at, block, NUM_MOVES);
    const by = (moves.find(({ event }) => !QUIET.includes(event.kind)) ?? moves[0])?.event.by;
    const holders = [...new Set(cell.bands.map(({ seq }) => seq))];
    Dom.fill("panel",
      Dom.make("h2", {}, title(block, frame.state.pool), ...holders.map((seq) => Dom.tag(memory, seq))),
      Dom.make("p", { class: "facts" }, facts(cell, block, frame)),
      ...texts(frame, cell),
      Dom.make("h3", {}, "What happened to it"),
      Dom.make("ol", { class: "moves" }, ...[...moves].reverse().map((move) => line(move, memory))),
      moves.length ? null : Dom.make("p", { class: "facts" }, "Nothing yet."),
      sources[by] ? Source.make(by, sources[by]) : null);
  }

  function hint() {
    const words = "Click a square: who holds it, its words, what happened to it, and the code that did it.";
    Dom.fill("panel", Dom.make("p", { class: "hint" }, words));
  }

  function title(block, pool) {
    if (Moves.isHost(block)) return `Host block ${Moves.numberOf(block)}`;
    const first = block * Cells.SLOTS_A_SQUARE;
    return pool.unit === "slots" ? `Slots ${first} to ${first + Cells.SLOTS_A_SQUARE - 1}` : `Block ${block}`;
  }

  function facts({ status, bands, count, origin }, block, { state, memory }) {
    const name = (seq) => Cast.label(memory, seq);
    if (Moves.isHost(block) && origin) return `A text of ${name(origin.seq)}, evicted from the device.`;
    if (Moves.isHost(block)) return status === "idle" ? "A text that was evicted from the device." : "Free.";
    if (status === "free") return "Free: nobody holds it, and nothing in it is of use.";
    if (status === "idle") return "Idle: nobody holds it, but its text can be found again.";
    if (state.pool.unit === "slots") {
      const piece = ({ seq, from, to, filled }) => `${name(seq)} has ${to - from} of these slots, ${filled} filled`;
      return `${bands.map(piece).join("; ")}.`;
    }
    const [{ index, filled }] = bands, size = state.pool.block_size, first = index * size + 1;
    const held = count > 1 ? `Held by ${count} sequences` : "Held by one sequence";
    return `${held}. Place ${index} in its table: tokens ${first} to ${first + size - 1}, ${filled} computed.`;
  }

  /** Its tokens, a box a slot; a line for each holder that has another text in it. */
  function texts(frame, { bands, origin }) {
    const { pool, sequences } = frame.state, isSlots = pool.unit === "slots";
    const size = isSlots ? Cells.SLOTS_A_SQUARE : pool.block_size;
    if (!bands.length) return origin ? [row(origin.texts, size)] : [];
    const rows = bands.map(({ seq, index, from, to, filled }) => {
      const start = isSlots ? firstToken(sequences[seq], index, from) : index * size;
      return row(sequences[seq].texts.slice(start, start + filled), to - from);
    });
    return rows.filter((each, i) => rows.findIndex((other) => other.textContent === each.textContent) === i);
  }

  /** Which token of a sequence the square begins with, at slot `from`: its piece begins anywhere. */
  function firstToken({ slots: [start] }, index, from) {
    return (Math.floor(start / Cells.SLOTS_A_SQUARE) + index) * Cells.SLOTS_A_SQUARE + from - start;
  }

  function row(pieces, num_slots) {
    const boxes = Array.from({ length: num_slots }, (_, i) => (i < pieces.length
      ? Dom.make("span", { class: "token" }, visible(pieces[i]))
      : Dom.make("span", { class: "token empty" }, " ")));
    return Dom.make("p", { class: "tokens" }, ...boxes);
  }

  /** A space is a dot, a line's end a hook; the token that a text begins with has no letters. A server may hide all. */
  function visible(piece) {
    if (piece === null) return " ";
    return piece === "" ? "‹s›" : piece.replaceAll("\n", "⏎").replace(/^ /, "·");
  }

  function line({ event, at }, memory) {
    const words = Words.ofMove(event, memory);
    const step = Dom.make("span", { class: "at" }, `step ${at}`);
    return Dom.make("li", {}, step, `${words[0].toUpperCase()}${words.slice(1)}.`);
  }

  return { show, hint };
})();
