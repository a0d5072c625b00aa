"use strict";

/* The reducer: the state of an engine's memory after an event, from the state before it and the event alone.
 *
 *     state = Reducer.apply(state, event)
 *
 * It knows no page. A state is never changed: what an event touches is copied, the rest is shared with the state before
 * it, so that any state may be kept as a keyframe. Between two that are kept, together() copies a list of thousands once
 * and not at each event: of the states in between nothing may be kept. nanovllm/trace/replay.py is the same function in Python.
 *
 * A state:
 *     pool, host         what there is, as in the snapshot; host is null without a second tier
 *     sequences          {name: {tokens, texts, num_computed_tokens, block_table, slots, ...}}, until they end
 *     waiting, running   names, in the order of the queues
 *     ref_counts         how many tables hold each block
 *     free               the free blocks, in the order in which they are taken: cached ones stand at the end
 *     cached             {block: hash} of the texts that can be found again
 *     host_ref_counts, host_free, host_cached      the same of the second tier
 *     loading            {block of the host: block of the device}, on their way
 */
const Reducer = (() => {
  let own = null; // the copies that together() has made: nobody else has them

  /** The state after `event`. A snapshot is a state by itself; an event that moves nothing gives the state back. */
  function apply(state, event) {
    if (event.kind === "snapshot") return begin(event);
    const change = CHANGES[event.kind];
    return change ? { ...state, ...change(state, event) } : state;
  }

  /** `play` applies many events, and keeps no state but the last one. */
  function together(play) {
    own = new Set();
    try {
      return play();
    } finally {
      own = null;
    }
  }

  function begin({ step, pool, host, state }) {
    const sequences = Object.fromEntries(state.sequences.map((each) => [each.seq, { ...NEW, ...each }]));
    return { ...state, pool, host, step, sequences };
  }

  const NEW = { carried_by: null, num_computed_tokens: 0, block_table: [], slots: null };

  // ---- sequences and queues

  function arrive(state, { seq, request, tokens, texts, max_num_tokens, carried_by }) {
    const sequence = { ...NEW, seq, request, tokens, texts, max_num_tokens, carried_by };
    const sequences = { ...state.sequences, [seq]: sequence };
    return carried_by === null ? { sequences, waiting: [...state.waiting, seq] } : { sequences };
  }

  function admit(state, { seq, num_computed_tokens }) {
    const queues = { waiting: without(state.waiting, seq), running: [...state.running, seq] };
    return { ...queues, ...withSequence(state, seq, { num_computed_tokens }) };
  }

  function forked(state, { seq, from, behind }) {
    const { num_computed_tokens } = state.sequences[from];
    const running = state.running.flatMap((each) => (each === behind ? [each, seq] : [each]));
    return { running, ...withSequence(state, seq, { carried_by: null, num_computed_tokens }) };
  }

  function preempt(state, { seq }) {
    const queues = { running: without(state.running, seq), waiting: [seq, ...state.waiting] };
    return { ...queues, ...withSequence(state, seq, { num_computed_tokens: 0 }) };
  }

  function end(state, { seq }) {
    const queues = { waiting: without(state.waiting, seq), running: without(state.running, seq) };
    return { ...queues, sequences: withoutKey(state.sequences, seq) };
  }

  function chunk(state, { seq, end }) {
    return withSequence(state, seq, { num_computed_tokens: end });
  }

  function token(state, { seq, token, text }) {
    const { tokens, texts } = state.sequences[seq];
    return withSequence(state, seq, { tokens: [...tokens, token], texts: [...texts, text] });
  }

  // ---- slots and blocks

  const reserved = (state, { seq, start, end }) => withSequence(state, seq, { slots: [start, end] });
  const released = (state, { seq }) => withSequence(state, seq, { slots: null });

  /** Taken, shared or hit: it has one holder more, and is in the holder's table. */
  function held(state, { block, seq, index }) {
    const block_table = [...state.sequences[seq].block_table];
    while (block_table.length < index) block_table.push(null); // until the event of that place comes
    block_table[index] = block;
    const ref_counts = withItem(state.ref_counts, block, state.ref_counts[block] + 1);
    return { ref_counts, free: without(state.free, block), ...withSequence(state, seq, { block_table }) };
  }

  /** One holder less. After a copy the table has the new block in its place already. */
  function givenBack(state, { block, seq }) {
    const block_table = state.sequences[seq].block_table.map((each) => (each === block ? null : each));
    while (block_table.length && block_table.at(-1) === null) block_table.pop();
    const ref_counts = withItem(state.ref_counts, block, state.ref_counts[block] - 1);
    return { ref_counts, ...withSequence(state, seq, { block_table }) };
  }

  const free = (state, { block }) => ({ free: withFirst(state.free, block) });
  const idle = (state, { block }) => ({ free: withLast(state.free, block) });

  // ---- the two tiers

  const cached = (state, { block, hash }) => ({ cached: withItem(state.cached, block, hash) });
  const evicted = (state, { block }) => ({ cached: withoutKey(state.cached, block) });
  const hostEvicted = (state, { block }) => ({ host_cached: withoutKey(state.host_cached, block) });

  /** Its text is on the host, as the most recently used: it stands last in the host's queue. */
  const renewed = (state, { to }) => ({ host_free: withLast(without(state.host_free, to), to) });
  const stored = (state, { to, hash }) => (
    { ...renewed(state, { to }), host_cached: withItem(state.host_cached, to, hash) });

  /** Until it has arrived, a load holds both blocks. */
  function loaded(state, { from, to }) {
    const host_ref_counts = withItem(state.host_ref_counts, from, state.host_ref_counts[from] + 1);
    const ref_counts = withItem(state.ref_counts, to, state.ref_counts[to] + 1);
    const loading = withItem(state.loading, from, to);
    return { host_ref_counts, ref_counts, host_free: without(state.host_free, from), loading };
  }

  function arrived(state, { from, to }) {
    const host_free = from in state.host_cached ? withLast(state.host_free, from) : withFirst(state.host_free, from);
    const host_ref_counts = withItem(state.host_ref_counts, from, state.host_ref_counts[from] - 1);
    const ref_counts = withItem(state.ref_counts, to, state.ref_counts[to] - 1);
    return { host_ref_counts, ref_counts, host_free, loading: withoutKey(state.loading, from) };
  }

  /** Both queues and both indexes as they are after a step that failed. */
  const pools = (_, { free, cached, host_free, host_cached }) => ({ free, cached, host_free, host_cached });

  // ---- copies in which one thing differs

  /** A list or a record that may be changed. */
  function copy(old) {
    if (own?.has(old)) return old;
    const made = Array.isArray(old) ? [...old] : { ...old };
    own?.add(made);
    return made;
  }

  function without(list, item) {
    const at = list.indexOf(item);
    if (at < 0) return list;
    const rest = copy(list);
    rest.splice(at, 1);
    return rest;
  }

  function withFirst(list, item) {
    const longer = copy(list);
    longer.unshift(item);
    return longer;
  }

  function withLast(list, item) {
    const longer = copy(list);
    longer.push(item);
    return longer;
  }

  const withItem = (old, place, item) => Object.assign(copy(old), { [place]: item });

  function withoutKey(record, key) {
    const rest = copy(record);
    delete rest[key];
    return rest;
  }

  function withSequence(state, seq, changes) {
    return { sequences: { ...state.sequences, [seq]: { ...state.sequences[seq], ...changes } } };
  }

  const CHANGES = {
    arrive, admit, forked, preempt, end, chunk, token, step: (_, { step }) => ({ step }),
    reserved, released, taken: held, shared: held, hit: held, given_back: givenBack, free, idle,
    cached, evicted, stored, renewed, host_evicted: hostEvicted, loaded, arrived,
    pools,
  };

  return { apply, together };
})();
