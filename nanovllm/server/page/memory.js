"use strict";

/* What a reader still wants to know when the engine has forgotten it: who arrived, how each ended, and whose text a
 * cached block holds. Like the reducer it is pure; unlike the state it is the page's own.
 *
 *     places     {request: its place in the order of arrival}: its letter and colour are chosen by that
 *     count      how many requests have arrived
 *     prompts    {name: the number of tokens of its prompt}
 *     ended      {name: why}
 *     origins    {hash: {seq, index, texts}}: the block of which sequence a text was computed in first
 *
 * Of `origins` no frame has a copy: there are thousands, and one that is known never changes. They are added in place.
 */
const Memory = (() => {
  const MOST_ENDED = 64;
  const NOTHING = { places: {}, count: 0, prompts: {}, ended: {}, origins: {} };

  const begin = (state) => meet(NOTHING, state);

  /** Go on with `state`, of which a snapshot tells: who is new is known from now on. */
  function meet(memory, { sequences, cached, pool }) {
    const origins = { ...memory.origins };
    for (const [seq, { block_table, texts }] of Object.entries(sequences)) {
      memory = know(memory, seq);
      block_table.forEach((block, index) => {
        if (block in cached) origins[cached[block]] ??= origin(seq, index, texts, pool);
      });
    }
    return { ...memory, origins };
  }

  /** `state` is the one before the event, and `after` the one behind it. */
  function note(memory, state, event, after) {
    const { kind, seq } = event;
    if (kind === "snapshot") return meet(memory, after);
    if (kind === "end") return { ...memory, ended: { ...memory.ended, [seq]: event.why } };
    if (kind === "arrive") {
      return { ...know(memory, seq), prompts: { ...memory.prompts, [seq]: event.tokens.length } };
    }
    if (kind === "cached" && !(event.hash in memory.origins)) {
      memory.origins[event.hash] = originOf(state, event.block);
    }
    return memory;
  }

  function know(memory, seq) {
    const request = family(seq);
    if (request in memory.places) return memory;
    return { ...memory, places: { ...memory.places, [request]: memory.count }, count: memory.count + 1 };
  }

  function originOf({ sequences, pool }, block) {
    for (const [seq, { block_table, texts }] of Object.entries(sequences)) {
      const index = block_table.indexOf(block);
      if (index >= 0) return origin(seq, index, texts, pool);
    }
    return null;
  }

  const origin = (seq, index, texts, { block_size }) => (
    { seq, index, texts: texts.slice(index * block_size, (index + 1) * block_size) });

  /** What can still be shown: a server's run has no end, and the page's memory has. */
  function prune({ places, count, prompts, ended, origins }, { sequences, cached, host_cached }) {
    const hashes = new Set([...Object.values(cached), ...Object.values(host_cached)]);
    const kept = { origins: filter(origins, (hash) => hashes.has(hash)) };
    kept.prompts = filter(prompts, (seq) => seq in sequences);
    kept.ended = Object.fromEntries(Object.entries(ended).slice(-MOST_ENDED));
    const authors = Object.values(kept.origins).flatMap((each) => each?.seq ?? []);
    const shown = new Set([...Object.keys(sequences), ...Object.keys(kept.ended), ...authors].map(family));
    return { places: filter(places, (request) => shown.has(request)), count, ...kept };
  }

  const filter = (record, keep) => Object.fromEntries(Object.entries(record).filter(([key]) => keep(key)));

  /** The samples of a request are one family: "F" of "F.0", "F.1" and "F.beam2". */
  const family = (seq) => seq.replace(/\.(\d+|beam\d+)$/, "");

  return { begin, note, prune, family };
})();
