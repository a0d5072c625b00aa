"use strict";

/* How the connection is, which server it is, and how fast it is. */
const Status = (() => {
  const WORDS = {
    connecting: "Connecting",
    live: "Live",
    lost: "Connection lost: trying again",
    refused: "This server asks for its key",
    hidden: "Not connected while hidden",
  };
  const SECONDS = 2; // of which the speed is told
  let recent = []; // [{at, tokens, steps}], a message each
  let timer = null;
  let server = null, size = null; // of a block, in tokens

  function show(state) {
    const status = Dom.byId("status");
    status.hidden = false;
    if (status.dataset.state === state) return;
    status.dataset.state = state;
    status.textContent = WORDS[state];
    timer ??= setInterval(tell, 1000);
  }

  /** `told` is {model, show_text, can_prompt, run}: another `run` than before is a server that was started again. */
  function about(told) {
    if (server && server.run !== told.run) Runs.end();
    server = told;
    document.title = `${server.model}: the pool, live`;
    Prompt.offer(server.can_prompt ? server.model : null);
    lead();
  }

  /** The pool of which the server's snapshot tells. */
  function pool({ block_size }) {
    size = block_size;
    lead();
  }

  function lead() {
    if (!server) return; // a page that is fed by hand
    const tokens = size ? ` for ${size} tokens` : "", { model, show_text } = server;
    const square = `A square is a block of its memory${tokens}, a colour is a request. `;
    const hidden = show_text ? "" : "Texts are not shown: the server was started without --show-text.";
    Dom.byId("lead").textContent = `${model} serves here. ${square}${hidden}`;
  }

  function count(events) {
    const of = (kind) => events.filter((event) => event.kind === kind).length;
    recent.push({ at: LiveTape.now(), tokens: of("token"), steps: of("step") });
  }

  function tell() {
    recent = recent.filter(({ at }) => at > LiveTape.now() - SECONDS);
    const sum = (name) => Math.round(recent.reduce((total, each) => total + each[name], 0) / SECONDS);
    if (Dom.byId("status").dataset.state !== "live") Dom.byId("speed").textContent = "";
    else Dom.byId("speed").textContent = recent.length ? `${sum("tokens")} tokens/s, ${sum("steps")} steps/s` : "at rest";
  }

  return { show, about, pool, count };
})();
