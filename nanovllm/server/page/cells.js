/* The contents of each square of a pool, computed from a frame. No DOM. A cell is:
 *
 *     block      its number
 *     status     "held", "idle" (cached, with no holder) or "free"
 *     count      the number of holders
 *     bands      {seq, index, from, to, filled} for each holder: slots `from` to `to`, of which `filled` are written
 *     hash       of the cached text in it, or null
 *     origin     {seq, index, texts}: the sequence and block that computed the text, if the page has seen it
 *     isTouched  true if this step changed it
 *     isMarked   true if the page highlights it
 */

export const SLOTS_PER_SQUARE = 8; // stage 1 has no blocks: a square shows slots, and can be in two pieces

/** Return the cells of the device's pool. `marked` are the blocks to highlight. */
export function deviceCells(frame, events, marked = []) {
  const cells = frame.state.pool.unit === "slots" ? cellsOfPieces(frame) : cellsOfBlocks(frame);
  for (const block of touchedBlocks(events)) if (block in cells) cells[block].isTouched = true;
  for (const block of marked) cells[block].isMarked = true;
  return cells;
}

/** Return the cells of the host's pool. */
export function hostCells({ state, memory }, events) {
  const cells = emptyCells(state.host.num_blocks);
  for (const { kind, block, from, to } of events) {
    const touched = { stored: to, renewed: to, loaded: from, host_evicted: block }[kind];
    if (touched !== undefined) cells[touched].isTouched = true;
  }
  for (const [block, hash] of Object.entries(state.host_cached)) {
    Object.assign(cells[block], { status: "idle", hash, origin: memory.origins[hash] ?? null });
  }
  return cells;
}

const emptyCells = (num_cells) => Array.from({ length: num_cells }, (_, block) => (
  { block, status: "free", count: 0, bands: [], hash: null, origin: null, isTouched: false, isMarked: false }));

function cellsOfBlocks({ state, memory }) {
  const { num_blocks, block_size } = state.pool, cells = emptyCells(num_blocks);
  for (const seq of state.running) {
    const { block_table, num_computed_tokens } = state.sequences[seq];
    block_table.forEach((block, index) => {
      const filled = clamp(num_computed_tokens - index * block_size, block_size);
      addBand(cells[block], { seq, index, from: 0, to: block_size, filled });
    });
  }
  for (const [block, hash] of Object.entries(state.cached)) {
    Object.assign(cells[block], { hash, origin: memory.origins[hash] ?? null });
    if (cells[block].status === "free") cells[block].status = "idle";
  }
  return cells;
}

function cellsOfPieces({ state }) {
  const size = SLOTS_PER_SQUARE, cells = emptyCells(Math.ceil(state.pool.num_blocks / size));
  for (const seq of state.running.filter((each) => state.sequences[each].slots)) {
    const { slots: [start, end], num_computed_tokens } = state.sequences[seq], first = Math.floor(start / size);
    for (let block = first; block * size < end; block += 1) {
      const from = Math.max(start - block * size, 0), to = Math.min(end - block * size, size);
      const filled = clamp(start + num_computed_tokens - block * size - from, to - from);
      addBand(cells[block], { seq, index: block - first, from, to, filled });
    }
  }
  return cells;
}

function addBand(cell, band) {
  cell.status = "held";
  cell.count += 1;
  cell.bands.push(band);
}

function touchedBlocks(events) {
  const blocks = new Set();
  for (const { kind, block, from, to, start, end } of events) {
    if (block !== undefined && kind !== "cached" && kind !== "host_evicted") blocks.add(block);
    if (kind === "copied" || kind === "stored") blocks.add(from);
    if (kind === "copied" || kind === "loaded" || kind === "disk_loaded") blocks.add(to);
    if (kind !== "reserved" && kind !== "released") continue;
    for (let i = Math.floor(start / SLOTS_PER_SQUARE); i * SLOTS_PER_SQUARE < end; i += 1) blocks.add(i);
  }
  return blocks;
}

/** Return the share of the pool that is held. The timeline needs it for every step, and it costs less than totals(). */
export function shareHeld({ pool, sequences, free }) {
  if (pool.unit === "blocks") return 1 - free.length / pool.num_blocks;
  return slotsHeld(Object.values(sequences)) / pool.num_blocks;
}

/** Count promised, held and used slots, as the engine's own report does: a shared block counts once. */
export function totals({ state: { pool, running, sequences } }, cells) {
  const seqs = running.map((seq) => sequences[seq]), all = pool.num_blocks * pool.block_size;
  const promised = sum(seqs, ({ max_num_tokens }) => Math.ceil(max_num_tokens / pool.block_size) * pool.block_size);
  if (pool.unit === "slots") {
    const used = sum(seqs, ({ slots, num_computed_tokens }) => (slots ? num_computed_tokens : 0));
    return { all, promised, held: slotsHeld(seqs), used };
  }
  const heldCells = cells.filter(({ status }) => status === "held");
  const used = sum(heldCells, ({ bands }) => Math.max(...bands.map(({ filled }) => filled)));
  return { all, promised, held: heldCells.length * pool.block_size, used };
}

const slotsHeld = (sequences) => sum(sequences, ({ slots }) => (slots ? slots[1] - slots[0] : 0));
const clamp = (value, max) => Math.max(0, Math.min(value, max));
const sum = (items, value) => items.reduce((total, item) => total + value(item), 0);
