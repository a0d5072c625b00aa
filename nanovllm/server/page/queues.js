"use strict";

/* Who runs, who waits and who is done, each with its words so far: what was given is pale, what was generated is not. */
const Queues = (() => {
  const SHOWN = 90; // characters: the end of a text is what moves

  function show(frame, events, selected) {
    const { state, memory } = frame;
    fill("running", state.running.map((seq) => row(frame, seq, "", seq === selected)));
    fill("waiting", state.waiting.map((seq) => row(frame, seq, reason(memory, seq, events), seq === selected)));
    fill("done", Object.keys(memory.ended).map((seq) => done(memory, seq)));
  }

  function fill(id, rows) {
    Dom.byId(id).replaceChildren(...(rows.length ? rows : [Dom.make("li", { class: "nobody" }, "nobody")]));
    Dom.byId(id).closest("details").querySelector("h2").dataset.count = rows.length;
  }

  function row({ state, memory }, seq, note, isSelected) {
    const { texts, num_computed_tokens, max_num_tokens } = state.sequences[seq];
    const words = Dom.make("span", { class: "words" }, ...lastWords(texts, memory.prompts[seq] ?? 0));
    const share = Dom.make("span", { class: "share", title: `${num_computed_tokens} tokens are in the pool, of at most ${max_num_tokens}` },
      `${num_computed_tokens} / ${max_num_tokens}`);
    const facts = note ? Dom.make("span", { class: "facts" }, note) : null;
    return Dom.make("li", { class: isSelected ? "selected" : null }, Dom.tag(memory, seq), words, share, facts);
  }

  /** The prompt pale, the output not; what does not fit is cut off at the left. */
  function lastWords(texts, prompt_length) {
    const prompt = texts.slice(0, prompt_length).join(""), output = texts.slice(prompt_length).join("");
    const cut = Math.max(0, prompt.length + output.length - SHOWN);
    const line = (text) => text.replaceAll("\n", " ");
    return [Dom.make("span", {}, Dom.make("span", { class: "prompt" }, line(prompt.slice(cut))), line(output.slice(Math.max(0, cut - prompt.length))))];
  }

  function reason(memory, seq, events) {
    const held = events.find((event) => event.kind === "held_up" && event.seq === seq);
    return held ? Words.whyHeldUp(held, Cast.label(memory, seq)) : "";
  }

  /** Most end as they should: only the others need a word. */
  function done(memory, seq) {
    const word = { abort: "aborted", error: "failed" }[memory.ended[seq].why];
    return Dom.make("li", {}, Dom.tag(memory, seq), word ? Dom.make("span", { class: "facts" }, word) : null);
  }

  return { show };
})();
