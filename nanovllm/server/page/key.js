"use strict";

/* The server's key, if it asks for one. The page forgets it when it is closed. */
const Key = (() => {
  const WHICH = "The one that it was started with: --api-key.";
  let key = "";

  const headers = (more = {}) => (key ? { ...more, Authorization: `Bearer ${key}` } : more);

  /** Ask for it; `retry()` is called when it is there. */
  function ask(retry) {
    const form = Dom.byId("key-form");
    form.hidden = false;
    Dom.byId("key-says").textContent = key ? `That was not its key. ${WHICH}` : WHICH;
    form.onsubmit = (event) => {
      event.preventDefault();
      key = Dom.byId("key").value.trim();
      form.hidden = true;
      retry();
    };
  }

  return { headers, ask };
})();
