/* The selected block: its holders, its text, what happened to it, and the source of the function that moved it.
 *
 * A block of the device is a number; "h3" is block 3 of the host.
 */

import { SLOTS_PER_SQUARE } from "./cells.js";
import { fill, label, make, tag } from "./dom.js";
import { movePhrase } from "./words.js";

const NUM_MOVES = 3;
const MINOR_MOVES = ["cached", "free", "idle"]; // also listed, but they don't explain who holds the block

export const isHostBlock = (block) => String(block).startsWith("h");
export const blockNumber = (block) => Number(String(block).replace("h", ""));

/** `sources` maps a function's name to {file, line, text}. `code` names one to show instead of the last mover. */
export function showPanel({ tape, sources }, step, block, cell, code = null) {
  const end = Math.min(step, tape.length), frame = tape.frameAt(end), { memory } = frame;
  const moves = lastMoves(tape, end, block);
  const by = code ?? (moves.find(({ event }) => !MINOR_MOVES.includes(event.kind)) ?? moves[0])?.event.by;
  const holders = [...new Set(cell.bands.map(({ seq }) => seq))];
  fill("panel",
    make("h2", {}, title(block, frame.state.pool), ...holders.map((seq) => tag(memory, seq))),
    make("p", { class: "facts" }, facts(cell, block, frame), cell.hash in memory.on_disk ? " The disk has a copy." : ""),
    ...makeTexts(frame, cell),
    make("h3", {}, "What happened to it"),
    make("ol", { class: "moves" }, ...[...moves].reverse().map((move) => makeMove(move, memory))),
    moves.length ? null : make("p", { class: "facts" }, "Nothing yet."),
    sources[by] ? makeSource(by, sources[by]) : null);
}

export function showHint() {
  const words = "Click a square to see its holder, its tokens, its history and the code behind it.";
  fill("panel", make("p", { class: "hint" }, words));
}

function title(block, pool) {
  if (isHostBlock(block)) return `Host block ${blockNumber(block)}`;
  const first = block * SLOTS_PER_SQUARE;
  return pool.unit === "slots" ? `Slots ${first} to ${first + SLOTS_PER_SQUARE - 1}` : `Block ${block}`;
}

function facts({ status, bands, count, origin }, block, { state, memory }) {
  if (isHostBlock(block) && origin) return `Computed by ${label(memory, origin.seq)}, and evicted from the device.`;
  if (isHostBlock(block)) return status === "idle" ? "A block that was evicted from the device." : "Free.";
  if (status === "free") return "Free: no sequence holds it, and nothing is cached in it.";
  if (status === "idle") return "Idle: no sequence holds it, but it is still cached.";
  if (state.pool.unit === "slots") {
    const name = (seq) => label(memory, seq);
    const pieces = bands.map(({ seq, from, to, filled }) => (
      `${name(seq)} has ${to - from} of these slots, ${filled} filled`));
    return `${pieces.join("; ")}.`;
  }
  const [{ index, filled }] = bands, size = state.pool.block_size, first = index * size + 1;
  const held = count > 1 ? `Held by ${count} sequences` : "Held by one sequence";
  return `${held}. Place ${index} in its table: tokens ${first} to ${first + size - 1}, ${filled} computed.`;
}

// ---- its text

/** Create a row of tokens, with a box per slot, for each distinct text in the block. */
function makeTexts(frame, { bands, origin }) {
  const { pool, sequences } = frame.state, isSlots = pool.unit === "slots";
  const size = isSlots ? SLOTS_PER_SQUARE : pool.block_size;
  if (!bands.length) return origin ? [makeTokens(origin.texts, size)] : [];
  const rows = bands.map(({ seq, index, from, to, filled }) => {
    const start = isSlots ? firstToken(sequences[seq], index, from) : index * size;
    return makeTokens(sequences[seq].texts.slice(start, start + filled), to - from);
  });
  return rows.filter((row, i) => rows.findIndex((other) => other.textContent === row.textContent) === i);
}

/** Return the token at slot `from` of the square with this index in the sequence's piece, which can begin anywhere. */
function firstToken({ slots: [start] }, index, from) {
  return (Math.floor(start / SLOTS_PER_SQUARE) + index) * SLOTS_PER_SQUARE + from - start;
}

function makeTokens(texts, num_slots) {
  const boxes = Array.from({ length: num_slots }, (_, i) => (i < texts.length
    ? make("span", { class: "token" }, visible(texts[i]))
    : make("span", { class: "token empty" }, " ")));
  return make("p", { class: "tokens" }, ...boxes);
}

/** Make spaces, line breaks and the empty first token visible. A server without --show-text sends null. */
function visible(text) {
  if (text === null) return " ";
  return text === "" ? "‹s›" : text.replaceAll("\n", "⏎").replace(/^ /, "·");
}

// ---- its last moves

/** Return the block's last events as [{event, step}], the latest first: at least NUM_MOVES, if there are as many. */
function lastMoves(tape, step, block) {
  const moves = [];
  for (; step > tape.first && moves.length < NUM_MOVES; step -= 1) {
    const events = tape.eventsOf(step).filter((event) => isMoveOf(event, block, tape.snapshot.pool));
    for (const event of events.reverse()) moves.push({ event, step });
  }
  return moves;
}

function isMoveOf(event, block, pool) {
  const { kind, from, to, start, end } = event;
  if (isHostBlock(block)) {
    const blocks = { stored: to, renewed: to, loaded: from, arrived: from, host_evicted: event.block };
    return blocks[kind] === blockNumber(block);
  }
  if (pool.unit === "slots") {
    const first = block * SLOTS_PER_SQUARE, last = first + SLOTS_PER_SQUARE;
    return (kind === "reserved" || kind === "released") && start < last && end > first;
  }
  if (kind === "copied") return from === block || to === block;
  const blocks = { stored: from, loaded: to, arrived: to, host_evicted: null, disk_loaded: to, disk_arrived: to, lost: to };
  return (kind in blocks ? blocks[kind] : event.block) === block;
}

function makeMove({ event, step }, memory) {
  const phrase = movePhrase(event, memory);
  return make("li", {}, make("span", { class: "at" }, `step ${step}`), `${phrase[0].toUpperCase()}${phrase.slice(1)}.`);
}

// ---- the source of the function that moved it

/** Create a listing with its file and line. Code is dark; docstrings and comments are pale. */
export function makeSource(name, { file, line, text }) {
  const caption = make("figcaption", {}, make("b", {}, name), ` ${file}:${line}`);
  return make("figure", {}, caption, make("pre", { tabindex: 0 }, ...makeLines(text)));
}

/** Create the lines. A long one wraps with a hanging indent. */
function makeLines(text) {
  let isDocstring = false;
  return text.split("\n").map((line) => {
    const num_quotes = line.split('"""').length - 1, wasDocstring = isDocstring;
    if (num_quotes === 1) isDocstring = !isDocstring;
    const isPale = wasDocstring || num_quotes > 0 || line.trim().startsWith("#");
    const style = `--indent: ${line.length - line.trimStart().length + 2}`, comment = line.indexOf("  # ");
    const parts = comment < 0 || isPale ? [line]
      : [line.slice(0, comment), make("span", { class: "pale" }, line.slice(comment))];
    return make("span", { class: isPale ? "line pale" : "line", style }, ...parts, "\n");
  });
}
