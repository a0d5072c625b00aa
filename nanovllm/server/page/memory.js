"use strict";

/* What a reader still wants to know when the engine has forgotten it: who arrived, how each ended, and whose text a
 * cached block holds. Like the reducer it is pure; unlike the state it is the page's own.
 *
 *     requests   in order of arrival: what a request's letter and colour are chosen by
 *     prompts    {name: the number of tokens of its prompt}
 *     ended      {name: the sequence as it was at its end, and why}
 *     origins    {hash: {seq, index}}: the block of which sequence a text was computed in first
 */
const Memory = (() => {
  function begin(state) {
    const names = Object.keys(state.sequences);
    return { requests: [...new Set(names.map(family))], prompts: {}, ended: {}, origins: {} };
  }

  /** `state` is the one before the event. */
  function note(memory, state, event) {
    if (event.kind === "arrive") {
      const requests = [...new Set([...memory.requests, family(event.seq)])];
      return { ...memory, requests, prompts: { ...memory.prompts, [event.seq]: event.tokens.length } };
    }
    if (event.kind === "end") {
      const sequence = { ...state.sequences[event.seq], why: event.why };
      return { ...memory, ended: { ...memory.ended, [event.seq]: sequence } };
    }
    if (event.kind === "cached" && !(event.hash in memory.origins)) {
      return { ...memory, origins: { ...memory.origins, [event.hash]: placeOf(state, event.block) } };
    }
    return memory;
  }

  function placeOf(state, block) {
    for (const [seq, { block_table }] of Object.entries(state.sequences)) {
      const index = block_table.indexOf(block);
      if (index >= 0) return { seq, index };
    }
    return null;
  }

  /** The pieces of text of a sequence's tokens from `start` to `end`, also of one that has ended. */
  function textsOf({ state, memory }, seq, start, end) {
    return (state.sequences[seq] ?? memory.ended[seq]).texts.slice(start, end);
  }

  /** The samples of a request are one family: "F" of "F.0", "F.1" and "F.2". */
  const family = (seq) => seq.split(".")[0];

  return { begin, note, textsOf, family };
})();
