"use strict";

/* Words for what happened: a sentence for a step, and one for the last move of a block.
 *
 * A step may have fifty events. The sentence tells the one that the reader should look at, and the next one too if both
 * are at most MOST_WORDS long together.
 */
const Words = (() => {
  const MOST_WORDS = 14;

  /** The sentence of a step. `before` and `after` are the frames around it, `earlier` the events of the step before. */
  function ofStep(events, earlier, before, after) {
    const name = (seq) => Cast.label(after.memory, seq);
    const of = (kind) => events.filter((event) => event.kind === kind);
    const context = { name, of, before: before.state, after: after.state, earlier };
    let told = "";
    for (const phrase of PHRASES) {
      const text = phrase(context);
      if (!text) continue;
      if (!told) told = text;
      else if (count(`${told} ${text}`) <= MOST_WORDS) return `${told} ${text}`;
    }
    return told || "Nothing moves in this step.";
  }

  // ---- from what is seldom and strange to what happens all the time; each is at most MOST_WORDS long

  const PHRASES = [
    ({ of }) => first(of("refused"), ({ request }) => `Request ${request} is refused: it can never fit.`),
    ({ of, name }) => first(of("preempt"), (event) => event.why === "blocks" && event.for !== event.seq
      ? `${name(event.for)} needs a block. ${name(event.seq)} gives up all of its blocks and waits.`
      : `${name(event.seq)} finds no free block: it gives up its own and waits.`),
    ({ of, name, after }) => first(of("released"), ({ seq }) => {
      const { sizes, total } = freePieces(after), who = after.waiting[0], needed = who && after.sequences[who].max_num_tokens;
      return who && needed <= total && needed > Math.max(...sizes)
        ? `${name(seq)} ends: ${total} slots are free, but not ${needed} together for ${name(who)}.` : "";
    }),
    ({ of, name }) => first(of("copied"), ({ from, to, seq }) =>
      `${name(seq)} copies block ${from} into block ${to} before it writes.`),
    ({ of, name }) => first(of("loaded"), ({ seq }, all) => {
      const same = all.filter((event) => event.seq === seq);
      return `${blocks(same)} of ${name(seq)} ${same.length > 1 ? "return" : "returns"} from the host.`;
    }),
    ({ of, name, before }) => first(of("hit"), (event, all) => {
      const same = all.filter(({ seq }) => seq === event.seq);
      const idle = same.filter(({ was }) => was === "idle").length;
      return `${name(event.seq)} finds ${blocks(same)} computed already: ${same.length - idle} held, ${idle} idle.`;
    }),
    ({ of, name }) => first(of("forked"), ({ from }, all) => `${name(from)} is forked: ${all.length + 1} samples share its blocks.`),
    ({ of }) => first(of("stored"), ({ from, to }, all) => all.length === 1
      ? `Block ${from} is evicted: its text moves to the host's block ${to}.`
      : `${blocks(all)} are evicted: their texts move to the host.`),
    ({ of }) => first(of("evicted"), ({ block }, all) => all.length === 1
      ? `Block ${block} is evicted: its text is forgotten.`
      : `${blocks(all)} are evicted: their texts are forgotten.`),
    ({ of }) => first(of("abort"), ({ request }) => `${request} is aborted by its reader.`),
    ({ of, name }) => first(of("end").filter(({ why }) => why !== "abort"), (_, all) => all.length === 1
      ? `${name(all[0].seq)} ends and gives its memory back.`
      : `${list(all.map(({ seq }) => name(seq)))} end and give their memory back.`),
    ({ of, name, earlier }) => first(of("held_up").filter((event) => !isOld(event, earlier)), (event) =>
      whyHeldUp(event, name(event.seq))),
    ({ of, name }) => first(of("admit"), (_, all) => all.length === 1
      ? `${name(all[0].seq)} is admitted.`
      : `${list(all.map(({ seq }) => name(seq)))} are admitted.`),
    ({ of, name }) => first(of("chunk").filter(({ start, end, why }) => end - start > 1), ({ seq, start, end, why }) =>
      `${name(seq)} computes ${end - start} tokens${why === "recompute" ? " again" : ""}.`),
    ({ of, name }) => first(of("taken").filter(({ why }) => why === "grow"), ({ block, seq, index }, all) => all.length === 1
      ? `${name(seq)}'s last block is full: it takes block ${block}.`
      : `${blocks(all)} are taken: ${list(all.map(({ seq }) => name(seq)))} grow.`),
    ({ of, name }) => first(of("arrive"), (_, all) => all.length === 1
      ? `${name(all[0].seq)} arrives.`
      : `${list(all.map(({ seq }) => name(seq)))} arrive.`),
    ({ of }) => first(of("token"), (_, all) => `${all.length} ${all.length > 1 ? "sequences get" : "sequence gets"} a token${all.length > 1 ? " each" : ""}.`),
    ({ of, name, earlier }) => first(of("held_up").filter((event) => isOld(event, earlier)), ({ seq }) => `${name(seq)} still waits.`),
  ];

  const WAITS = {
    piece: (who, { needed, free }) => `${who} needs ${needed} slots together: ${free} are free, but scattered.`,
    promise: (who, { needed, free }) => `${who} waits: it may need ${needed} blocks, ${free} are not promised.`,
    blocks: (who, { needed, free }) => `${who} waits: it needs ${needed} blocks, ${free} are free.`,
    seat: (who) => `${who} waits: every seat is taken.`,
    budget: (who) => `${who} waits: this step has enough tokens to compute.`,
    preemption: (who) => `${who} waits: nobody is admitted in a step that preempted.`,
    batch: (who) => `${who} waits until the last of this batch ends.`,
  };

  const whyHeldUp = (event, who) => WAITS[event.why]?.(who, event) ?? "";

  /** What an event did to a block, for the block's own panel. */
  function ofEvent(event, memory) {
    const who = "seq" in event ? Cast.label(memory, event.seq) : "";
    const moves = {
      taken: () => ({ admit: `${who} took it when it was admitted`, grow: `${who} took it: its last block was full`, copy: `${who} took it for a copy of its own` })[event.why],
      shared: () => `${who} shares it since the fork`,
      hit: () => `${who} found it by its text, ${event.was}`,
      given_back: () => ({ end: `${who} ended and gave it back`, preempt: `${who} was preempted and gave it back`, abort: `${who} was aborted and gave it back`, copy: `${who} let go of it: it has a copy of its own now`, failed: `${who} failed and gave it back` })[event.why],
      free: () => "it went to the front of the queue of free blocks",
      idle: () => "nobody holds it, but its text stays: it went to the back of the queue",
      copied: () => `block ${event.from} was copied into block ${event.to}`,
      cached: () => "it was full, so its text can be found by its hash",
      evicted: () => "its text was forgotten, to make room",
      stored: () => `its text went to the host, into block ${event.to}`,
      renewed: () => "the host had its text already, and keeps it longer",
      loaded: () => `its text came back from the host for ${who}`,
      arrived: () => "the load has arrived",
      host_evicted: () => "the host forgot its text, to make room",
      reserved: () => `${who} reserved these slots for its whole life`,
      released: () => `${who} gave these slots back`,
    };
    return moves[event.kind]?.() ?? "";
  }

  /** Of stage 1's pool: what lies between the pieces. */
  function freePieces({ pool, sequences }) {
    const held = Object.values(sequences).map(({ slots }) => slots).filter(Boolean).sort((a, b) => a[0] - b[0]);
    const edges = [0, ...held.flat(), pool.num_blocks];
    const sizes = held.concat([null]).map((_, i) => edges[2 * i + 1] - edges[2 * i]);
    return { sizes, total: sizes.reduce((sum, size) => sum + size, 0) };
  }

  // ---- grammar

  const first = (events, tell) => (events.length ? tell(events[0], events) : "");
  const blocks = ({ length }) => (length === 1 ? "1 block" : `${length} blocks`);
  const count = (text) => text.split(/\s+/).length;
  const isOld = (event, earlier) => earlier.some(({ kind, seq, why }) => kind === "held_up" && seq === event.seq && why === event.why);

  function list(names) {
    if (names.length > 3) return `${names.length} sequences`;
    return names.length > 1 ? `${names.slice(0, -1).join(", ")} and ${names.at(-1)}` : names[0];
  }

  return { ofStep, ofEvent, whyHeldUp, MOST_WORDS };
})();
