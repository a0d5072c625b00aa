/* The reducer: the frame after an event, computed only from the frame before it and the event. No DOM.
 *
 *     frame = advance(frame, event)
 *
 * A frame is {state, memory}. The state is the engine's memory, and nanovllm/trace/replay.py computes the same one:
 *
 *     pool, host         as in the snapshot; host is null without a second tier
 *     sequences          {name: {tokens, texts, num_computed_tokens, block_table, slots, ...}}, until they end
 *     waiting, running   names, in queue order
 *     ref_counts         how many tables hold each block
 *     free               free blocks in the order in which they are taken: cached blocks are at the end
 *     cached             {block: hash} of the blocks in the prefix cache
 *     host_ref_counts, host_free, host_cached      the same for the host
 *     loading            {host block: device block} for each load in progress
 *     disk_loading       device blocks that are read from the disk
 *
 * The memory is what the engine has forgotten and the page still shows:
 *
 *     places     {request: its place in order of arrival}, which determines its letter and color
 *     count      how many requests have arrived
 *     prompts    {name: the number of prompt tokens}
 *     ended      {name: why it ended}
 *     origins    {hash: {seq, index, texts}}: the sequence and the block that first held a cached text
 *     on_disk    {hash: true} of the latest blocks that are known to have a file
 *
 * Frames are immutable: an event copies what it changes and shares the rest, so any frame can be kept as a keyframe.
 * There are two exceptions. Inside inPlace(), a list of thousands is copied once, not at each event. And all frames
 * share `origins`, which only grows.
 */

const MAX_ENDED = 64, MAX_ON_DISK = 10_000;
const NEW_SEQUENCE = { carried_by: null, num_computed_tokens: 0, block_table: [], slots: null };
const EMPTY_MEMORY = { places: {}, count: 0, prompts: {}, ended: {}, origins: {}, on_disk: {} };
let ownCopies = null; // the lists and records that inPlace() has copied and may change

/** Return the frame that a snapshot describes. */
export function begin(snapshot) {
  const state = beginState(snapshot);
  return { state, memory: addKnown(EMPTY_MEMORY, state) };
}

/** Return the frame after `event`. */
export function advance({ state, memory }, event) {
  const after = event.kind === "snapshot" ? beginState(event) : { ...state, ...CHANGES[event.kind]?.(state, event) };
  return { state: after, memory: remember(memory, state, event, after) };
}

/** Run `play`, which advances through many events and keeps only the last frame. */
export function inPlace(play) {
  ownCopies = new Set();
  try {
    return play();
  } finally {
    ownCopies = null;
  }
}

/** Return the request of a sequence: "F" for "F", "F.0", "F.1" and "F.beam2". */
export const requestOf = (seq) => seq.replace(/\.(\d+|beam\d+)$/, "");

function beginState({ step, pool, host, state }) {
  const sequences = Object.fromEntries(state.sequences.map((each) => [each.seq, { ...NEW_SEQUENCE, ...each }]));
  return { disk_loading: [], ...state, pool, host, step, sequences };
}

// ---- sequences and queues

function arrive(state, { seq, request, tokens, texts, max_num_tokens, carried_by }) {
  const sequence = { ...NEW_SEQUENCE, seq, request, tokens, texts, max_num_tokens, carried_by };
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

/** Taken, shared or hit: the block gains a holder, and is in that holder's table. */
function held(state, { block, seq, index }) {
  const block_table = [...state.sequences[seq].block_table];
  while (block_table.length < index) block_table.push(null); // until the event for that place comes
  block_table[index] = block;
  const ref_counts = withItem(state.ref_counts, block, state.ref_counts[block] + 1);
  return { ref_counts, free: without(state.free, block), ...withSequence(state, seq, { block_table }) };
}

/** The block loses a holder. After a copy, the table already has the new block in its place. */
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

/** The host already has the text. It moves the block to the end of its queue, as the most recently used one. */
const renewed = (state, { to }) => ({ host_free: withLast(without(state.host_free, to), to) });
const stored = (state, { to, hash }) => (
  { ...renewed(state, { to }), host_cached: withItem(state.host_cached, to, hash) });

/** A load holds both blocks until it has arrived. */
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

/** A read from the disk holds its block of the device until it has arrived or is lost. */
function diskLoaded(state, { to }) {
  const ref_counts = withItem(state.ref_counts, to, state.ref_counts[to] + 1);
  return { ref_counts, disk_loading: withLast(state.disk_loading, to) };
}

function diskLeft(state, { to }) {
  const ref_counts = withItem(state.ref_counts, to, state.ref_counts[to] - 1);
  return { ref_counts, disk_loading: without(state.disk_loading, to) };
}

/** Both queues and both indexes, after a step that failed. */
const pools = (_, { free, cached, host_free, host_cached }) => ({ free, cached, host_free, host_cached });

const CHANGES = {
  arrive, admit, forked, preempt, end, chunk, token, step: (_, { step }) => ({ step }),
  reserved, released, taken: held, shared: held, hit: held, given_back: givenBack, free, idle,
  cached, evicted, stored, renewed, host_evicted: hostEvicted, loaded, arrived,
  disk_loaded: diskLoaded, disk_arrived: diskLeft, lost: diskLeft,
  pools,
};

// ---- copies with one difference

/** Return a list or a record that may be changed. */
function copyOf(old) {
  if (ownCopies?.has(old)) return old;
  const copy = Array.isArray(old) ? [...old] : { ...old };
  ownCopies?.add(copy);
  return copy;
}

function without(list, item) {
  const i = list.indexOf(item);
  if (i < 0) return list;
  const copy = copyOf(list);
  copy.splice(i, 1);
  return copy;
}

function withFirst(list, item) {
  const copy = copyOf(list);
  copy.unshift(item);
  return copy;
}

function withLast(list, item) {
  const copy = copyOf(list);
  copy.push(item);
  return copy;
}

const withItem = (old, key, item) => Object.assign(copyOf(old), { [key]: item });

function withoutKey(record, key) {
  const copy = copyOf(record);
  delete copy[key];
  return copy;
}

function withSequence(state, seq, changes) {
  return { sequences: { ...state.sequences, [seq]: { ...state.sequences[seq], ...changes } } };
}

// ---- the memory

/** Add the sequences and the cached texts of a snapshot's state. */
function addKnown(memory, { sequences, cached, pool }) {
  const origins = { ...memory.origins };
  for (const [seq, { block_table, texts }] of Object.entries(sequences)) {
    memory = addRequest(memory, seq);
    block_table.forEach((block, index) => {
      if (block in cached) origins[cached[block]] ??= originOf(seq, index, texts, pool);
    });
  }
  return { ...memory, origins };
}

function remember(memory, state, event, after) {
  const { kind, seq } = event;
  if (kind === "snapshot") return addKnown(memory, after);
  if (kind === "end") return { ...memory, ended: { ...memory.ended, [seq]: event.why } };
  if (kind === "arrive") {
    return { ...addRequest(memory, seq), prompts: { ...memory.prompts, [seq]: event.tokens.length } };
  }
  if (kind === "disk_stored" || kind === "disk_loaded") {
    return { ...memory, on_disk: withItem(memory.on_disk, event.hash, true) };
  }
  if (kind === "disk_evicted" || kind === "disk_bad") {
    return { ...memory, on_disk: withoutKey(memory.on_disk, event.hash) };
  }
  if (kind === "cached" && !(event.hash in memory.origins)) memory.origins[event.hash] = originIn(state, event.block);
  return memory;
}

function addRequest(memory, seq) {
  const request = requestOf(seq);
  if (request in memory.places) return memory;
  return { ...memory, places: { ...memory.places, [request]: memory.count }, count: memory.count + 1 };
}

function originIn({ sequences, pool }, block) {
  for (const [seq, { block_table, texts }] of Object.entries(sequences)) {
    const index = block_table.indexOf(block);
    if (index >= 0) return originOf(seq, index, texts, pool);
  }
  return null;
}

const originOf = (seq, index, texts, { block_size }) => (
  { seq, index, texts: texts.slice(index * block_size, (index + 1) * block_size) });

/** Forget what can no longer be shown. A server's run never ends, but the page's memory must stay bounded. */
export function prune({ state, memory }) {
  const { sequences, cached, host_cached } = state;
  const hashes = new Set([...Object.values(cached), ...Object.values(host_cached)]);
  const origins = filter(memory.origins, (hash) => hashes.has(hash));
  const on_disk = lastOf(memory.on_disk, MAX_ON_DISK), ended = lastOf(memory.ended, MAX_ENDED);
  const authors = Object.values(origins).flatMap((origin) => origin?.seq ?? []);
  const requests = new Set([...Object.keys(sequences), ...Object.keys(ended), ...authors].map(requestOf));
  const places = filter(memory.places, (request) => requests.has(request));
  const prompts = filter(memory.prompts, (seq) => seq in sequences);
  return { state, memory: { places, count: memory.count, prompts, ended, origins, on_disk } };
}

const lastOf = (record, count) => Object.fromEntries(Object.entries(record).slice(-count));
const filter = (record, keep) => Object.fromEntries(Object.entries(record).filter(([key]) => keep(key)));
