"use strict";

/* What there is to see in each block of a pool, worked out of a state: plain objects, no DOM.
 *
 *     status   "held", "idle" (cached, and nobody holds it) or "free"
 *     count    how many hold it
 *     bands    a band for each holder, from slot `from` to slot `to`, of which the first `filled` are written
 *     fresh    slots that this step wrote: [from, to)
 */
const Cells = (() => {
  function ofDevice(frame, events, pool) {
    const cells = pool.unit === "slots" ? ofPieces(frame, pool) : ofBlocks(frame, pool);
    for (const block of touchedBy(events, pool)) if (cells[block]) cells[block].isTouched = true;
    return cells;
  }

  function ofBlocks({ state, memory }, pool) {
    const cells = Array.from({ length: pool.num_blocks }, (_, block) => ({
      block, status: "free", count: state.ref_counts[block], bands: [], origin: null, isTouched: false,
    }));
    for (const seq of state.running) {
      const { block_table, num_computed_tokens } = state.sequences[seq];
      block_table.forEach((block, index) => {
        const filled = clamp(num_computed_tokens - index * pool.block_size, pool.block_size);
        cells[block].status = "held";
        cells[block].bands.push({ seq, index, from: 0, to: pool.block_size, filled });
      });
    }
    for (const [block, hash] of Object.entries(state.cached)) {
      cells[block].origin = memory.origins[hash];
      if (cells[block].status === "free") cells[block].status = "idle";
    }
    return cells;
  }

  /** Stage 1 has no blocks. The same squares show its slots, 8 each: a square may be in two pieces. */
  function ofPieces({ state }, pool) {
    const size = SLOTS_A_CELL, num_cells = Math.ceil(pool.num_blocks / size);
    const cells = Array.from({ length: num_cells }, (_, block) => ({
      block, status: "free", count: 0, bands: [], origin: null, isTouched: false,
    }));
    for (const seq of state.running) {
      const { slots, num_computed_tokens } = state.sequences[seq];
      if (!slots) continue;
      const [start, end] = slots;
      for (let block = Math.floor(start / size); block * size < end; block += 1) {
        const from = Math.max(start - block * size, 0), to = Math.min(end - block * size, size);
        const filled = clamp(start + num_computed_tokens - block * size - from, to - from);
        cells[block].status = "held";
        cells[block].count += 1;
        cells[block].bands.push({ seq, index: block - Math.floor(start / size), from, to, filled });
      }
    }
    return cells;
  }

  function ofHost({ state, memory }, host) {
    return Array.from({ length: host.num_blocks }, (_, block) => {
      const hash = state.host_cached[block];
      return { block, status: hash ? "idle" : "free", count: 0, bands: [], origin: memory.origins[hash] ?? null, isTouched: false };
    });
  }

  /** The blocks that an event names: what this step did something to. */
  function touchedBy(events, pool) {
    const blocks = new Set();
    for (const event of events) {
      if ("block" in event && event.kind !== "cached" && event.kind !== "host_evicted") blocks.add(event.block);
      if (event.kind === "copied") blocks.add(event.from).add(event.to);
      if (event.kind === "stored") blocks.add(event.from);
      if (event.kind === "loaded") blocks.add(event.to);
      if (event.kind === "reserved" || event.kind === "released") {
        for (let slot = event.start; slot < event.end; slot += 1) blocks.add(Math.floor(slot / SLOTS_A_CELL));
      }
    }
    return blocks;
  }

  /** Slots promised, held and used, as the engine's own report counts them. */
  function totals({ state }, pool) {
    const size = pool.block_size, running = state.running.map((seq) => state.sequences[seq]);
    const promised = sum(running.map(({ max_num_tokens }) => Math.ceil(max_num_tokens / size) * size));
    if (pool.unit === "slots") {
      return {
        all: pool.num_blocks, promised,
        held: sum(running.map(({ slots }) => slots[1] - slots[0])),
        used: sum(running.map(({ num_computed_tokens }) => num_computed_tokens)),
      };
    }
    const filled = new Map(); // of each block that somebody holds; a shared one counts once
    for (const { block_table, num_computed_tokens } of running) {
      block_table.forEach((block, index) => {
        const slots = clamp(num_computed_tokens - index * size, size);
        filled.set(block, Math.max(slots, filled.get(block) ?? 0));
      });
    }
    return { all: pool.num_blocks * size, promised, held: filled.size * size, used: sum([...filled.values()]) };
  }

  const SLOTS_A_CELL = 8;
  const clamp = (value, max) => Math.max(0, Math.min(value, max));
  const sum = (values) => values.reduce((total, value) => total + value, 0);

  return { ofDevice, ofHost, touchedBy, totals, SLOTS_A_CELL };
})();
