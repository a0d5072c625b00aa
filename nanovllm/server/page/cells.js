"use strict";

/* What there is to see in each square of a pool, worked out of a state: plain objects, no DOM.
 *
 *     block      its number
 *     status     "held", "idle" (cached, and nobody holds it) or "free"
 *     count      how many hold it
 *     bands      one for each holder, from slot `from` to slot `to`, of which the first `filled` are written
 *     hash       of the text that it holds, if that is cached
 *     origin     {seq, index}: whose text that is, if the page has seen it
 *     isTouched  whether this step did something to it
 */
const Cells = (() => {
  const SLOTS_A_SQUARE = 8; // stage 1 has no blocks: the same squares show its slots, and one may be in two pieces

  function ofDevice(frame, events) {
    const { pool } = frame.state;
    const cells = pool.unit === "slots" ? ofPieces(frame) : ofBlocks(frame);
    for (const block of touchedBy(events)) if (block in cells) cells[block].isTouched = true;
    return cells;
  }

  const empty = (num_cells) => Array.from({ length: num_cells }, (_, block) => (
    { block, status: "free", count: 0, bands: [], hash: null, origin: null, isTouched: false }));

  function ofBlocks({ state, memory }) {
    const { num_blocks, block_size } = state.pool, cells = empty(num_blocks);
    for (const seq of state.running) {
      const { block_table, num_computed_tokens } = state.sequences[seq];
      block_table.forEach((block, index) => {
        const filled = clamp(num_computed_tokens - index * block_size, block_size);
        hold(cells[block], { seq, index, from: 0, to: block_size, filled });
      });
    }
    for (const [block, hash] of Object.entries(state.cached)) {
      Object.assign(cells[block], { hash, origin: memory.origins[hash] ?? null });
      if (cells[block].status === "free") cells[block].status = "idle";
    }
    return cells;
  }

  function ofPieces({ state }) {
    const size = SLOTS_A_SQUARE, cells = empty(Math.ceil(state.pool.num_blocks / size));
    for (const seq of state.running.filter((each) => state.sequences[each].slots)) {
      const { slots: [start, end], num_computed_tokens } = state.sequences[seq], first = Math.floor(start / size);
      for (let block = first; block * size < end; block += 1) {
        const from = Math.max(start - block * size, 0), to = Math.min(end - block * size, size);
        const filled = clamp(start + num_computed_tokens - block * size - from, to - from);
        hold(cells[block], { seq, index: block - first, from, to, filled });
      }
    }
    return cells;
  }

  function hold(cell, band) {
    cell.status = "held";
    cell.count += 1;
    cell.bands.push(band);
  }

  function ofHost({ state, memory }, events) {
    const cells = empty(state.host.num_blocks);
    for (const block of touchedOnHost(events)) cells[block].isTouched = true;
    for (const [block, hash] of Object.entries(state.host_cached)) {
      Object.assign(cells[block], { status: "idle", hash, origin: memory.origins[hash] ?? null });
    }
    return cells;
  }

  /** The blocks of the device that were moved. */
  function touchedBy(events) {
    const blocks = new Set();
    for (const { kind, block, from, to, start, end } of events) {
      if (block !== undefined && kind !== "cached" && kind !== "host_evicted") blocks.add(block);
      if (kind === "copied" || kind === "stored") blocks.add(from);
      if (kind === "copied" || kind === "loaded") blocks.add(to);
      if (kind !== "reserved" && kind !== "released") continue;
      for (let i = Math.floor(start / SLOTS_A_SQUARE); i * SLOTS_A_SQUARE < end; i += 1) blocks.add(i);
    }
    return blocks;
  }

  const touchedOnHost = (events) => events.flatMap(({ kind, block, from, to }) => (
    { stored: to, renewed: to, loaded: from, host_evicted: block }[kind] ?? []));

  /** Cheaper than all totals: asked for every step. */
  function shareHeld({ pool, sequences, free }) {
    if (pool.unit === "blocks") return 1 - free.length / pool.num_blocks;
    const isHeld = Object.values(sequences).filter(({ slots }) => slots);
    return sum(isHeld, ({ slots: [start, end] }) => end - start) / pool.num_blocks;
  }

  /** Slots promised, held and used, as the engine's own report counts them; a shared block counts once. */
  function totals({ state }, all_cells) {
    const { pool, running, sequences } = state, seqs = running.map((seq) => sequences[seq]);
    const promised = sum(seqs, ({ max_num_tokens }) => Math.ceil(max_num_tokens / pool.block_size) * pool.block_size);
    const all = pool.num_blocks * pool.block_size, isHeld = seqs.filter(({ slots }) => slots);
    if (pool.unit === "slots") {
      const held = sum(isHeld, ({ slots: [start, end] }) => end - start);
      return { all, promised, held, used: sum(isHeld, ({ num_computed_tokens }) => num_computed_tokens) };
    }
    const cells = all_cells.filter(({ status }) => status === "held");
    const used = sum(cells, ({ bands }) => Math.max(...bands.map(({ filled }) => filled)));
    return { all, promised, held: cells.length * pool.block_size, used };
  }

  const clamp = (value, max) => Math.max(0, Math.min(value, max));
  const sum = (items, value) => items.reduce((total, item) => total + value(item), 0);

  return { ofDevice, ofHost, totals, shareHeld, SLOTS_A_SQUARE };
})();
