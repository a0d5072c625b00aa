/* Words for events: a sentence for a step, a reason for a wait, and a phrase for what happened to a block.
 *
 * A step may have fifty events, and a live page shows several steps at once. The sentence reports the most unusual
 * event, and the next most unusual one too if both fit in MAX_WORDS.
 */

import { label } from "./dom.js";

const MAX_WORDS = 14;

/** Return the sentence for a step. `after` is the frame after it, and `earlier` has the previous step's events. */
export function stepSentence(events, earlier, after) {
  const name = (seq) => label(after.memory, seq);
  const of = (kind) => events.filter((event) => event.kind === kind);
  let sentence = "";
  for (const phrase of PHRASES) {
    const next = phrase({ of, name, earlier, state: after.state, on_disk: after.memory.on_disk });
    if (next && sentence && countWords(`${sentence} ${next}`) <= MAX_WORDS) return `${sentence} ${next}`;
    sentence ||= next;
  }
  return sentence || "No sequence can run in this step.";
}

// ---- from the most unusual event to the most common one

const PHRASES = [
  ({ of }) => first(of("snapshot"), () => "The connection was lost. This is the current state."),
  ({ of }) => first(of("refused"), ({ request }) => `Request ${request} is rejected: it can never fit.`),
  ({ of, name }) => first(of("preempt"), (event, all) => {
    const causes = { reset: "The cache is reset", "step failed": "The step failed", lost: "A block was lost on its way" };
    const cause = causes[event.why];
    if (cause) return `${cause}: ${list(all, name)} ${isSeveral(all) ? "start" : "starts"} over.`;
    if (all.length > 1) return `No block is free. ${list(all, name)} give up all their blocks and wait.`;
    return event.for && event.for !== event.seq
      ? `${name(event.for)} needs a block. ${name(event.seq)} gives up all its blocks and waits.`
      : `${name(event.seq)} finds no free block, gives up its own and waits.`;
  }),
  ({ of, name, state }) => first(of("released"), ({ seq }) => scattered(name(seq), name, state)),
  ({ of, name }) => first(of("forked"), ({ from }, all) => (
    `${name(from)} is forked: ${all.filter((event) => event.from === from).length + 1} samples share its blocks.`)),
  ({ of, name }) => first(of("copied"), ({ from, to, seq }, all) => (all.length === 1
    ? `${name(seq)} copies block ${from} into block ${to} before writing.`
    : `${all.length} sequences copy a block each.`)),
  ({ of, name }) => first(of("loaded"), ({ seq }, all) => {
    const same = all.filter((event) => event.seq === seq);
    return `${blocks(same)} of ${name(seq)} ${same.length > 1 ? "are" : "is"} loaded from the host.`;
  }),
  ({ of, name }) => first(of("disk_loaded"), ({ seq }, all) => {
    const same = all.filter((event) => event.seq === seq);
    return `${blocks(same)} of ${name(seq)} ${same.length > 1 ? "are" : "is"} read from the disk.`;
  }),
  ({ of, name }) => first(of("hit"), ({ seq }, all) => {
    const same = all.filter((event) => event.seq === seq), idle = same.filter(({ was }) => was === "idle").length;
    const were = { 0: "all held", [same.length]: "all idle" }[idle] ?? `${same.length - idle} held, ${idle} idle`;
    return `${name(seq)} finds ${blocks(same)} in the cache, ${same.length > 1 ? were : same[0].was}.`;
  }),
  ({ of }) => first(of("stored"), ({ from, to }, all) => (all.length === 1
    ? `Block ${from} is evicted to block ${to} of the host.`
    : `${blocks(all)} are evicted to the host.`)),
  ({ of }) => first(of("evicted").filter((event) => isOnHost(event, of)), ({ block }, all) => (all.length === 1
    ? `Block ${block} is evicted: the host already has a copy.`
    : `${blocks(all)} are evicted: the host already has copies.`)),
  ({ of, on_disk }) => first(of("evicted").filter(({ hash }) => hash in on_disk), ({ block }, all) => (all.length === 1
    ? `Block ${block} is evicted: the disk has a copy.`
    : `${blocks(all)} are evicted: the disk has copies.`)),
  ({ of }) => first(of("evicted"), ({ block }, all) => (all.length === 1
    ? `Block ${block} is evicted: its contents are lost.`
    : `${blocks(all)} are evicted: their contents are lost.`)),
  ({ of, name }) => first(of("abort"), ({ request }) => `${name(request)} is aborted by its client.`),
  ({ of, name }) => first(of("end").filter(({ why }) => why !== "abort"), (_, all) => (all.length === 1
    ? `${name(all[0].seq)} finishes and frees its memory.`
    : `${list(all, name)} finish and free their memory.`)),
  ({ of, name }) => first(of("arrive"), (_, all) => `${list(all, name)} ${all.length > 1 ? "arrive" : "arrives"}.`),
  ({ of, name }) => first(of("admit"), (_, all) => `${list(all, name)} ${isSeveral(all) ? "are" : "is"} admitted.`),
  ({ of, name, earlier }) => first(of("held_up").filter((event) => !isRepeated(event, earlier)), (event) => (
    waitReason(event, name(event.seq)))),
  ({ of, name }) => first(of("draft_accepted"), ({ seq }, all) => {
    const right = all.reduce((sum, { num_tokens }) => sum + num_tokens, 0);
    const guesses = of("draft_proposed").reduce((sum, { tokens }) => sum + tokens.length, 0);
    const whose = isSeveral(all) ? `${seqs(all).size} sequences` : name(seq);
    return `${right} of ${guesses} ${guesses === 1 ? "guess" : "guesses"} for ${whose} ${right === 1 ? "is" : "are"} right.`;
  }),
  ({ of }) => first(of("disk_stored"), (_, all) => `${blocks(all)} ${all.length > 1 ? "are" : "is"} written to the disk.`),
  ({ of }) => first(of("disk_evicted"), (_, all) => `The disk has reached its size, and loses ${blocks(all)}.`),
  ({ of, name }) => first(of("chunk").filter(({ start, end }) => end - start > 1), (_, all) => {
    const num_tokens = all.reduce((sum, { start, end }) => sum + end - start, 0);
    const again = all.every(({ why }) => why === "recompute") ? "re" : "";
    return `${list(all, name)} ${again}${isSeveral(all) ? "compute" : "computes"} ${num_tokens} tokens.`;
  }),
  ({ of, name }) => first(of("taken").filter(({ why }) => why === "grow"), ({ block, seq }, all) => (all.length === 1
    ? `${name(seq)}'s last block is full, so it takes block ${block}.`
    : `${list(all, name)} ${isSeveral(all) ? "grow" : "grows"} by ${blocks(all)}.`)),
  ({ of }) => first(of("token"), (_, all) => {
    const sequences = isSeveral(all) ? `${seqs(all).size} sequences generate` : "1 sequence generates";
    if (all.length > seqs(all).size) return `${sequences} ${all.length} tokens.`;
    return `${sequences} a token${isSeveral(all) ? " each" : ""}.`;
  }),
];

/** Return a sentence if stage 1 has room for the next sequence, but not in one piece. */
function scattered(ended, name, { waiting, sequences, pool }) {
  const held = Object.values(sequences).flatMap(({ slots }) => (slots ? [slots] : [])).sort((a, b) => a[0] - b[0]);
  const edges = [0, ...held.flat(), pool.num_blocks];
  const pieces = [...held, null].map((_, i) => edges[2 * i + 1] - edges[2 * i]);
  const total = pieces.reduce((sum, size) => sum + size, 0);
  const needed = waiting.length ? sequences[waiting[0]].max_num_tokens : 0;
  if (needed > total || needed <= Math.max(...pieces)) return "";
  return `${ended} finishes. ${total} slots are free, but no ${needed} in a row for ${name(waiting[0])}.`;
}

const WAITS = {
  piece: (name, { needed }) => `${name} waits: no free piece has ${needed} slots.`,
  promise: (name, { needed, free }) => `${name} waits: it may need ${needed} blocks, but only ${free} are unpromised.`,
  blocks: (name, { needed, free }) => `${name} waits: it needs ${needed} blocks, but only ${free} are free.`,
  seat: (name) => `${name} waits: every seat is taken.`,
  budget: (name) => `${name} waits: the token budget of this step is spent.`,
  preemption: (name) => `${name} waits: a step that preempts admits no sequence.`,
  batch: (name) => `${name} waits until the batch has finished.`,
};

/** Return why the sequence called `name` is not admitted, from its "held_up" event. */
export const waitReason = (event, name) => WAITS[event.why]?.(name, event) ?? `${name} waits.`;

// ---- moves of a block

const TAKEN = {
  admit: "took it when it was admitted",
  grow: "took it because its last block was full",
  copy: "took it for its own copy",
};
const GIVEN_BACK = {
  end: "finished and gave it back",
  preempt: "was preempted and gave it back",
  abort: "was aborted and gave it back",
  copy: "let go of it because it has its own copy now",
  draft: "gave it back: it was for guesses, and they were wrong",
  failed: "could not be admitted, and gave it back",
};
const MOVES = {
  taken: (name, { why }) => `${name} ${TAKEN[why] ?? "took it"}`,
  shared: (name) => `${name} shares it after the fork`,
  hit: (name, { was }) => `${name} found it in the cache, where it was ${was}`,
  given_back: (name, { why }) => `${name} ${GIVEN_BACK[why] ?? "gave it back"}`,
  free: () => "it went to the front of the free queue",
  idle: () => "it went to the back of the free queue, and stays cached",
  copied: (_, { from, to }) => `block ${from} was copied into block ${to}`,
  cached: () => "it was full, so it was cached under its hash",
  evicted: () => "it was evicted to make room",
  stored: (_, { to }) => `it was copied to block ${to} of the host`,
  renewed: () => "the host already had a copy, which is now its most recently used block",
  loaded: (name) => `its contents were loaded from the host for ${name}`,
  arrived: () => "the load finished",
  host_evicted: () => "the host evicted it to make room",
  disk_loaded: (name) => `its contents are read from the disk for ${name}`,
  disk_arrived: () => "the read finished",
  lost: () => "the file was damaged or gone, so its contents must be computed",
  reserved: (name) => `${name} reserved these slots for its full length`,
  released: (name) => `${name} gave these slots back`,
};

/** Return what an event did to a block, as a phrase without a capital letter and a period. */
export const movePhrase = (event, memory) => MOVES[event.kind](event.seq ? label(memory, event.seq) : "", event);

// ---- grammar

const first = (events, phrase) => (events.length ? phrase(events[0], events) : "");
const blocks = ({ length }) => (length === 1 ? "1 block" : `${length} blocks`);
const countWords = (text) => text.split(/\s+/).length;

const seqs = (events) => new Set(events.map(({ seq }) => seq));
const isSeveral = (events) => seqs(events).size > 1;

/** Return the sequences of these events: "A", "A and B" or "5 sequences". */
function list(events, name) {
  const names = [...seqs(events)].map(name);
  if (names.length > 3) return `${names.length} sequences`;
  return names.length > 1 ? `${names.slice(0, -1).join(", ")} and ${names.at(-1)}` : names[0];
}

/** Return true if the host already has a copy of an evicted block. */
const isOnHost = ({ hash }, of) => of("renewed").some((event) => event.hash === hash);

/** Return true if the sequence waited for the same reason in the step before. */
function isRepeated({ seq, why }, earlier) {
  return earlier.some((event) => event.kind === "held_up" && event.seq === seq && event.why === why);
}
