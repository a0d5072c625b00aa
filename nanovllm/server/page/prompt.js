"use strict";

/* A prompt to try the server with: its text comes as it is generated, and its blocks are on the page meanwhile. */
const Prompt = (() => {
  let model = null, running = null;

  /** Nothing to offer: this address has the page only. */
  function offer(name) {
    model = name;
    Dom.byId("prompt").hidden = name === null;
  }

  function submit(event) {
    event.preventDefault();
    if (running) running.abort();
    else send();
  }

  async function send() {
    const began = performance.now(), said = { id: null, first: null };
    running = new AbortController();
    begin();
    try {
      const response = await ask(running.signal);
      if (response.status === 401) return Key.ask(send);
      if (!response.ok) throw new Error(await Sse.errorOf(response));
      for await (const { data } of Sse.messages(response)) if (data !== "[DONE]") take(JSON.parse(data), said, began);
      told(said, began);
    } catch (error) {
      tell(null, error.name === "AbortError" ? "Stopped: its blocks are free again." : `It failed: ${error.message}.`);
    } finally {
      running = null;
      Dom.byId("send").textContent = "Send";
    }
  }

  function ask(signal) {
    const body = { model, prompt: Dom.byId("words").value, max_tokens: Number(Dom.byId("most").value), stream: true };
    body.stream_options = { include_usage: true };
    const headers = Key.headers({ "Content-Type": "application/json" });
    return fetch("v1/completions", { method: "POST", headers, body: JSON.stringify(body), signal });
  }

  function begin() {
    Dom.byId("send").textContent = "Stop";
    Dom.fill("answer", Dom.make("span", { class: "prompt" }, Dom.byId("words").value));
    tell(null, "");
  }

  function take({ id, error, choices, usage }, said, began) {
    if (error) throw new Error(error.message);
    said.id ??= id;
    look(said);
    const text = choices?.[0]?.text ?? "";
    if (text) said.first ??= performance.now() - began;
    said.num_tokens = usage?.completion_tokens ?? said.num_tokens;
    Dom.byId("answer").append(text);
    Dom.byId("answer").scrollTop = Dom.byId("answer").scrollHeight;
  }

  /** As soon as its first block is on the page, it is chosen: so its table is drawn while it grows. */
  function look(said) {
    const { at } = Reader, frame = Follow.isFollowing() ? Runs.all[0].tape.frameAt(at.step) : null;
    const block = frame?.state.sequences[said.id]?.block_table[0];
    if (said.tag || block === undefined) return;
    said.tag = Dom.tag(frame.memory, said.id);
    if (at.block === null || at.owner !== null) Object.assign(at, { block, owner: said.id });
  }

  function told({ tag, num_tokens, first }, began) {
    const seconds = (performance.now() - began) / 1000;
    const count = num_tokens === undefined ? "Done" : `${num_tokens} tokens`;
    const start = first === null ? "" : `, the first text after ${Math.round(first)} ms`;
    tell(tag ?? null, `${count} in ${seconds.toFixed(2)} s${start}.`);
  }

  const tell = (tag, text) => Dom.fill("answered", tag, text || null);

  function start() {
    Dom.byId("ask").addEventListener("submit", submit);
    Dom.byId("words").addEventListener("keydown", (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) Dom.byId("ask").requestSubmit();
    });
  }

  return { offer, start };
})();
