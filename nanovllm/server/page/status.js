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

  function show(state) {
    const status = Dom.byId("status");
    status.hidden = false;
    if (status.dataset.state === state) return;
    status.dataset.state = state;
    status.textContent = WORDS[state];
    timer ??= setInterval(tell, 1000);
  }

  /** `server` is {model, show_text, can_prompt}. */
  function about({ model, show_text, can_prompt }) {
    document.title = `${model}: the pool, live`;
    Dom.byId("lead").textContent = `${model} serves here. A square is a block of its memory, a colour is a request. `
      + (show_text ? "" : "Texts are not shown: the server was started without --show-text.");
    Prompt.offer(can_prompt ? model : null);
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

  return { show, about, count };
})();
