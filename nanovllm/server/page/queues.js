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
    const { texts, prompt_length, num_computed_tokens, max_num_tokens } = { ...state.sequences[seq], prompt_length: memory.prompts[seq] };
    const words = Dom.make("span", { class: "words" }, ...lastWords(texts, prompt_length));
    const facts = note || `${num_computed_tokens} of at most ${max_num_tokens} tokens in the pool`;
    const body = Dom.make("div", {}, words, Dom.make("span", { class: "facts" }, facts));
    return Dom.make("li", { class: isSelected ? "selected" : null }, Dom.tag(memory, seq), body);
  }

  function lastWords(texts, prompt_length) {
    const prompt = texts.slice(0, prompt_length).join(""), output = texts.slice(prompt_length).join("");
    const cut = Math.max(0, prompt.length + output.length - SHOWN);
    const start = prompt.slice(cut), end = output.slice(Math.max(0, cut - prompt.length));
    return [Dom.make("span", { class: "prompt" }, (cut ? "…" : "") + start), Dom.make("span", {}, end)];
  }

  function reason(memory, seq, events) {
    const held = events.find((event) => event.kind === "held_up" && event.seq === seq);
    return held ? Words.whyHeldUp(held, Cast.label(memory, seq)) : "";
  }

  function done(memory, seq) {
    const { why } = memory.ended[seq];
    const words = { stop: "came to its end", length: "got all tokens that it asked for", abort: "was aborted", error: "failed" }[why];
    return Dom.make("li", { title: words }, Dom.tag(memory, seq), Dom.make("span", { class: "facts" }, why === "length" ? "" : why));
  }

  return { show };
})();
