"use strict";

/* Who runs, who waits and who is done, with its words so far: what was given is pale, what was generated is not. */
const Queues = (() => {
  const MOST_SHOWN = 90; // characters: the end of a text is what moves
  const MOST_ROWS = 16, MOST_DONE = 40; // a server may have hundreds

  function show(frame, events, selected) {
    const { state, memory } = frame;
    fill("running", state.running, firstRows(state.running, selected), (seq) => row(frame, seq, null, selected));
    const waiter = (seq) => row(frame, seq, reason(memory, seq, events), selected);
    fill("waiting", state.waiting, firstRows(state.waiting, selected), waiter);
    const ended = Object.keys(memory.ended);
    fill("done", ended, ended.slice(-MOST_DONE), (seq) => done(memory, seq));
  }

  /** A row for each of those shown, and a word on the others. */
  function fill(id, names, shown, make) {
    const more = names.length - shown.length, rows = shown.map(make);
    if (!rows.length) rows.push(Dom.make("li", { class: "nobody" }, "nobody"));
    if (more && id !== "done") rows.push(Dom.make("li", { class: "nobody" }, `and ${more} more`));
    Dom.fill(id, ...rows);
    Dom.byId(id).closest("details").querySelector("h2").dataset.count = id === "done" && more ? "" : names.length;
  }

  /** The selected one is always among them. */
  function firstRows(names, selected) {
    const first = names.slice(0, MOST_ROWS);
    return names.indexOf(selected) >= MOST_ROWS ? [selected, ...first.slice(1)] : first;
  }

  function row({ state, memory }, seq, reason, selected) {
    const { texts, num_computed_tokens, max_num_tokens } = state.sequences[seq];
    const told = `${num_computed_tokens} tokens are in the pool, of at most ${max_num_tokens}`;
    return Dom.make("li", { class: seq === selected ? "selected" : null },
      Dom.tag(memory, seq),
      isHidden(texts) ? bar(num_computed_tokens, max_num_tokens, memory.prompts[seq] ?? 0)
        : Dom.make("span", { class: "words" }, lastWords(texts, memory.prompts[seq] ?? 0)),
      Dom.make("span", { class: "share", title: told }, `${num_computed_tokens} / ${max_num_tokens}`),
      reason ? Dom.make("span", { class: "facts" }, reason) : null);
  }

  /** The server does not show its texts. */
  const isHidden = (texts) => texts[0] === null;

  /** How far it is: what was given, and what was generated, of all that it may become. */
  function bar(num_tokens, max_num_tokens, num_prompt_tokens) {
    const share = (tokens) => `width:${((100 * tokens) / max_num_tokens).toFixed(2)}%`;
    const given = Math.min(num_tokens, num_prompt_tokens);
    return Dom.make("span", { class: "far" }, Dom.make("span", { class: "given", style: share(given) }),
      Dom.make("span", { class: "generated", style: share(num_tokens - given) }));
  }

  function lastWords(texts, num_prompt_tokens) {
    const line = (pieces) => pieces.join("").replaceAll("\n", " ");
    const prompt = line(texts.slice(0, num_prompt_tokens)), output = line(texts.slice(num_prompt_tokens));
    const cut = Math.max(0, prompt.length + output.length - MOST_SHOWN);
    const given = Dom.make("span", { class: "prompt" }, prompt.slice(cut));
    return Dom.make("span", {}, given, output.slice(Math.max(0, cut - prompt.length)));
  }

  /** Told of the first in the queue. */
  function reason(memory, seq, events) {
    const held = events.find((event) => event.kind === "held_up" && event.seq === seq);
    return held ? Words.ofWaiting(held, Cast.label(memory, seq)) : null;
  }

  /** Most end as they should: only the others need a word. */
  function done(memory, seq) {
    const word = { abort: "aborted", error: "failed" }[memory.ended[seq]];
    return Dom.make("li", {}, Dom.tag(memory, seq), word ? Dom.make("span", { class: "facts" }, word) : null);
  }

  return { show };
})();
