"use strict";

/* Who runs, who waits and who is done, with its words so far: what was given is pale, what was generated is not. */
const Queues = (() => {
  const MOST_SHOWN = 90; // characters: the end of a text is what moves

  function show(frame, events, selected) {
    const { state, memory } = frame;
    fill("running", state.running.map((seq) => row(frame, seq, null, selected)));
    fill("waiting", state.waiting.map((seq) => row(frame, seq, reason(memory, seq, events), selected)));
    fill("done", Object.keys(memory.ended).map((seq) => done(memory, seq)));
  }

  function fill(id, rows) {
    Dom.fill(id, ...(rows.length ? rows : [Dom.make("li", { class: "nobody" }, "nobody")]));
    Dom.byId(id).closest("details").querySelector("h2").dataset.count = rows.length;
  }

  function row({ state, memory }, seq, reason, selected) {
    const { texts, num_computed_tokens, max_num_tokens } = state.sequences[seq];
    const told = `${num_computed_tokens} tokens are in the pool, of at most ${max_num_tokens}`;
    return Dom.make("li", { class: seq === selected ? "selected" : null },
      Dom.tag(memory, seq),
      Dom.make("span", { class: "words" }, lastWords(texts, memory.prompts[seq] ?? 0)),
      Dom.make("span", { class: "share", title: told }, `${num_computed_tokens} / ${max_num_tokens}`),
      reason ? Dom.make("span", { class: "facts" }, reason) : null);
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
    const word = { abort: "aborted", error: "failed" }[memory.ended[seq].why];
    return Dom.make("li", {}, Dom.tag(memory, seq), word ? Dom.make("span", { class: "facts" }, word) : null);
  }

  return { show };
})();
