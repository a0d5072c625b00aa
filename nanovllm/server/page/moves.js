"use strict";

/* Which events moved a block: what its panel tells. */
const Moves = (() => {
  /** The last events of a block up to a step, the latest first: [{event, at}]; at least `count`, and a step's all. "h3" is block 3 of the host. */
  function last(tape, step, block, count) {
    const found = [];
    for (let at = step; at > tape.first && found.length < count; at -= 1) {
      const events = tape.eventsOf(at).filter((event) => isOf(event, block, tape.snapshot.pool));
      found.push(...events.reverse().map((event) => ({ event, at })));
    }
    return found;
  }

  function isOf(event, block, pool) {
    if (isHost(block)) return ofHost(event) === numberOf(block);
    if (pool.unit === "slots") return isInPiece(event, block);
    if (event.kind === "copied") return event.from === block || event.to === block;
    return ofDevice(event) === block;
  }

  function ofHost({ kind, block, from, to }) {
    return { stored: to, renewed: to, loaded: from, arrived: from, host_evicted: block }[kind];
  }

  function ofDevice({ kind, block, from, to }) {
    const ends = { stored: from, loaded: to, arrived: to, host_evicted: null };
    return kind in ends ? ends[kind] : block;
  }

  function isInPiece({ kind, start, end }, square) {
    const size = Cells.SLOTS_A_SQUARE;
    return (kind === "reserved" || kind === "released") && start < (square + 1) * size && end > square * size;
  }

  const isHost = (block) => String(block).startsWith("h");
  const numberOf = (block) => Number(String(block).replace("h", ""));

  return { last, isHost, numberOf };
})();
