"use strict";

/* Words for what happened: a sentence for a step, and one for a move of a block.
 *
 * A step may have fifty events, and a live page tells of several steps at once. The sentence tells the one event that
 * the reader should look at, and the next one too if both are at most MOST_WORDS long together.
 */
const Words = (() => {
  const MOST_WORDS = 14;

  /** The sentence of a step. `before` and `after` are the frames around it, `earlier` the events of the step before. */
  function ofStep(events, earlier, before, after) {
    const name = (seq) => Cast.label(after.memory, seq);
    const of = (kind) => events.filter((event) => event.kind === kind);
    let told = "";
    for (const phrase of PHRASES) {
      const text = phrase({ of, name, earlier, state: after.state });
      if (text && told && count(`${told} ${text}`) <= MOST_WORDS) return `${told} ${text}`;
      told ||= text;
    }
    return told || "Nobody can run in this step.";
  }

  // ---- from what is seldom and strange to what happens all the time

  const PHRASES = [
    ({ of }) => first(of("snapshot"), () => "The connection was lost: this is how it is now."),
    ({ of }) => first(of("refused"), ({ request }) => `Request ${request} is refused: it can never fit.`),
    ({ of, name }) => first(of("preempt"), (event, all) => {
      const cause = { reset: "The cache is emptied", "step failed": "The step failed" }[event.why];
      if (cause) return `${cause}: ${list(all, name)} ${isSeveral(all) ? "start" : "starts"} over.`;
      if (all.length > 1) return `No block is free. ${list(all, name)} give up all of theirs and wait.`;
      return event.for && event.for !== event.seq
        ? `${name(event.for)} needs a block. ${name(event.seq)} gives up all of its blocks and waits.`
        : `${name(event.seq)} finds no free block: it gives up its own and waits.`;
    }),
    ({ of, name, state }) => first(of("released"), ({ seq }) => scattered(name(seq), name, state)),
    ({ of, name }) => first(of("forked"), ({ from }, all) => (
      `${name(from)} is forked: ${all.filter((event) => event.from === from).length + 1} samples share its blocks.`)),
    ({ of, name }) => first(of("copied"), ({ from, to, seq }, all) => (all.length === 1
      ? `${name(seq)} copies block ${from} into block ${to} before it writes.`
      : `${all.length} of them copy a block.`)),
    ({ of, name }) => first(of("loaded"), ({ seq }, all) => {
      const same = all.filter((event) => event.seq === seq);
      return `${blocks(same)} of ${name(seq)} ${same.length > 1 ? "return" : "returns"} from the host.`;
    }),
    ({ of, name }) => first(of("hit"), ({ seq }, all) => {
      const same = all.filter((event) => event.seq === seq), idle = same.filter(({ was }) => was === "idle").length;
      const were = { 0: "all held", [same.length]: "all idle" }[idle] ?? `${same.length - idle} held, ${idle} idle`;
      return `${name(seq)} finds ${blocks(same)} computed already, ${same.length > 1 ? were : same[0].was}.`;
    }),
    ({ of }) => first(of("stored"), ({ from, to }, all) => (all.length === 1
      ? `Block ${from} is evicted: its text moves to the host's block ${to}.`
      : `${blocks(all)} are evicted: their texts move to the host.`)),
    ({ of }) => first(of("evicted").filter((event) => isOnHost(event, of)), ({ block }, all) => (all.length === 1
      ? `Block ${block} is evicted: its text is on the host already.`
      : `${blocks(all)} are evicted: the host keeps their texts.`)),
    ({ of }) => first(of("evicted"), ({ block }, all) => (all.length === 1
      ? `Block ${block} is evicted: its text is forgotten.`
      : `${blocks(all)} are evicted: their texts are forgotten.`)),
    ({ of, name }) => first(of("abort"), ({ request }) => `${name(request)} is aborted by its reader.`),
    ({ of, name }) => first(of("end").filter(({ why }) => why !== "abort"), (_, all) => (all.length === 1
      ? `${name(all[0].seq)} ends and gives its memory back.`
      : `${list(all, name)} end and give their memory back.`)),
    ({ of, name }) => first(of("arrive"), (_, all) => `${list(all, name)} ${all.length > 1 ? "arrive" : "arrives"}.`),
    ({ of, name }) => first(of("admit"), (_, all) => `${list(all, name)} ${isSeveral(all) ? "are" : "is"} admitted.`),
    ({ of, name, earlier }) => first(of("held_up").filter((event) => !isOld(event, earlier)), (event) => (
      ofWaiting(event, name(event.seq)))),
    ({ of, name }) => first(of("chunk").filter(({ start, end }) => end - start > 1), (_, all) => {
      const num_tokens = all.reduce((sum, { start, end }) => sum + end - start, 0);
      const again = all.every(({ why }) => why === "recompute") ? " again" : "";
      return `${list(all, name)} ${isSeveral(all) ? "compute" : "computes"} ${num_tokens} tokens${again}.`;
    }),
    ({ of, name }) => first(of("taken").filter(({ why }) => why === "grow"), ({ block, seq }, all) => (all.length === 1
      ? `${name(seq)}'s last block is full: it takes block ${block}.`
      : `${blocks(all)} are taken: ${list(all, name)} ${isSeveral(all) ? "grow" : "grows"}.`)),
    ({ of }) => first(of("token"), (_, all) => {
      const sequences = isSeveral(all) ? `${seqs(all).size} sequences get` : "1 sequence gets";
      if (all.length > seqs(all).size) return `${sequences} ${all.length} tokens.`;
      return `${sequences} a token${isSeveral(all) ? " each" : ""}.`;
    }),
  ];

  /** Of stage 1: there is room, but not in one piece. */
  function scattered(ended, name, { waiting, sequences, pool }) {
    const held = Object.values(sequences).flatMap(({ slots }) => (slots ? [slots] : [])).sort((a, b) => a[0] - b[0]);
    const edges = [0, ...held.flat(), pool.num_blocks];
    const free = [...held, null].map((_, i) => edges[2 * i + 1] - edges[2 * i]);
    const total = free.reduce((sum, size) => sum + size, 0);
    const needed = waiting.length ? sequences[waiting[0]].max_num_tokens : 0;
    if (needed > total || needed <= Math.max(...free)) return "";
    return `${ended} ends: ${total} slots are free, but not ${needed} together for ${name(waiting[0])}.`;
  }

  const WAITS = {
    piece: (who, { needed }) => `${who} waits: no free piece has ${needed} slots.`,
    promise: (who, { needed, free }) => `${who} waits: it may need ${needed} blocks, ${free} are not promised.`,
    blocks: (who, { needed, free }) => `${who} waits: it needs ${needed} blocks, ${free} are free.`,
    seat: (who) => `${who} waits: every seat is taken.`,
    budget: (who) => `${who} waits: the tokens of this step are spent.`,
    preemption: (who) => `${who} waits: nobody is admitted in a step that preempted.`,
    batch: (who) => `${who} waits until the last of this batch ends.`,
  };

  /** Why `who` is not admitted: of an event "held_up". */
  const ofWaiting = (event, who) => WAITS[event.why]?.(who, event) ?? `${who} waits.`;

  // ---- moves of a block

  const TAKEN = {
    admit: "took it when it was admitted",
    grow: "took it: its last block was full",
    copy: "took it for a copy of its own",
  };
  const GIVEN_BACK = {
    end: "ended and gave it back",
    preempt: "was preempted and gave it back",
    abort: "was aborted and gave it back",
    copy: "let go of it: it has a copy of its own now",
    failed: "could not be admitted, and gave it back",
  };
  const MOVES = {
    taken: (who, { why }) => `${who} ${TAKEN[why] ?? "took it"}`,
    shared: (who) => `${who} shares it since the fork`,
    hit: (who, { was }) => `${who} found it by its text; it was ${was}`,
    given_back: (who, { why }) => `${who} ${GIVEN_BACK[why] ?? "gave it back"}`,
    free: () => "it went to the front of the queue of free blocks",
    idle: () => "nobody holds it, but its text stays: it went to the back of the queue",
    copied: (_, { from, to }) => `block ${from} was copied into block ${to}`,
    cached: () => "it was full, so its text can be found by its hash",
    evicted: () => "it was evicted: its text left it, to make room",
    stored: (_, { to }) => `its text was stored to the host, in block ${to} there`,
    renewed: () => "the host had its text already, and keeps it longer",
    loaded: (who) => `its text came back from the host for ${who}`,
    arrived: () => "the load arrived",
    host_evicted: () => "the host forgot its text, to make room",
    reserved: (who) => `${who} reserved these slots for its whole life`,
    released: (who) => `${who} gave these slots back`,
  };

  /** What an event did to a block, without a full stop. */
  const ofMove = (event, memory) => MOVES[event.kind](event.seq ? Cast.label(memory, event.seq) : "", event);

  // ---- grammar

  const first = (events, tell) => (events.length ? tell(events[0], events) : "");
  const blocks = ({ length }) => (length === 1 ? "1 block" : `${length} blocks`);
  const count = (text) => text.split(/\s+/).length;

  const seqs = (events) => new Set(events.map(({ seq }) => seq));
  const isSeveral = (events) => seqs(events).size > 1;

  /** "A", "A and B", "5 sequences": of whom these events are. */
  function list(events, name) {
    const names = [...seqs(events)].map(name);
    if (names.length > 3) return `${names.length} sequences`;
    return names.length > 1 ? `${names.slice(0, -1).join(", ")} and ${names.at(-1)}` : names[0];
  }

  /** Nothing has to be copied for it. */
  const isOnHost = ({ hash }, of) => of("renewed").some((event) => event.hash === hash);

  /** The same was told of the step before. */
  function isOld({ seq, why }, earlier) {
    return earlier.some((event) => event.kind === "held_up" && event.seq === seq && event.why === why);
  }

  return { ofStep, ofWaiting, ofMove };
})();
