"use strict";

/* The connection to a server: /events into Page.feed(). After a break it tries again, and a new snapshot goes on with
 * the tape. A page that nobody sees lets go of it: the engine tells events only while somebody looks.
 */
const Feed = (() => {
  const SECONDS = [0.5, 1, 2, 5]; // before each try; then always the last
  const SECONDS_HIDDEN = 60;
  let connection = null, num_tries = 0, timer = null;

  async function connect() {
    clearTimeout(timer);
    connection = new AbortController();
    try {
      const response = await fetch("events", { headers: Key.headers(), signal: connection.signal, cache: "no-store" });
      if (response.status === 401) return refused();
      if (!response.ok) throw new Error(await Sse.errorOf(response));
      for await (const message of Sse.messages(response)) take(message);
      throw new Error("the server ended the connection");
    } catch (error) {
      if (error.name !== "AbortError") retry();
    }
  }

  function take({ event, data }) {
    num_tries = 0;
    if (event === "server") Status.about(JSON.parse(data));
    else if (event === "message") feed(JSON.parse(data));
  }

  /** A message has the events of a tenth of a second. */
  function feed(events) {
    Status.show("live");
    Status.count(events);
    for (const event of events) Page.feed(event);
    Page.settle();
  }

  function retry() {
    Status.show("lost");
    timer = setTimeout(connect, 1000 * (SECONDS[num_tries] ?? SECONDS.at(-1)));
    num_tries += 1;
  }

  function refused() {
    Status.show("refused");
    Key.ask(connect);
  }

  function disconnect() {
    connection?.abort();
    clearTimeout(timer);
    connection = timer = null;
  }

  function look() {
    clearTimeout(timer);
    if (!document.hidden && !connection) connect();
    if (document.hidden) timer = setTimeout(leave, 1000 * SECONDS_HIDDEN);
  }

  function leave() {
    disconnect();
    Status.show("hidden");
  }

  function start() {
    document.addEventListener("visibilitychange", look);
    connect();
  }

  return { start };
})();
