/* The page of a server: its events and its status. */

import { byId } from "./dom.js";
import { askForKey, messagesOf, withKey } from "./http.js";
import { feed, settle } from "./reader.js";
import { endRun, now } from "./tape.js";

// ---- /events. If the connection is lost, the page reconnects, and a new snapshot continues the tape. A hidden page
// disconnects, because the engine reports events only while a page is watching.

const RETRY_SECONDS = [0.5, 1, 2, 5]; // before each attempt; the last value repeats
const HIDDEN_SECONDS = 60;
let connection = null, num_tries = 0, timer = null;

/** Connect, and stay connected while the page is visible. */
export function goLive() {
  document.title = byId("title").textContent = "The pool, live";
  byId("no-data").hidden = true;
  document.addEventListener("visibilitychange", onVisibility);
  connect();
}

async function connect() {
  clearTimeout(timer);
  connection = new AbortController();
  try {
    const response = await fetch("events", { headers: withKey(), signal: connection.signal, cache: "no-store" });
    if (response.status === 401) {
      showStatus("refused");
      askForKey(connect);
      return;
    }
    for await (const { event, data } of messagesOf(response)) {
      num_tries = 0;
      if (event === "server") describeServer(JSON.parse(data));
      else if (event === "message") take(JSON.parse(data));
    }
    throw new Error("the server ended the connection");
  } catch (error) {
    if (error.name !== "AbortError") retry();
  }
}

/** Handle a message: the events of a tenth of a second. */
function take(events) {
  showStatus("live");
  countRates(events);
  for (const event of events) {
    if (event.kind === "snapshot") describePool(event.pool);
    feed(event);
  }
  settle();
}

function retry() {
  connection = null;
  showStatus("lost");
  timer = setTimeout(connect, 1000 * (RETRY_SECONDS[num_tries] ?? RETRY_SECONDS.at(-1)));
  num_tries += 1;
}

function onVisibility() {
  clearTimeout(timer);
  if (!document.hidden && !connection) connect();
  if (document.hidden) timer = setTimeout(disconnect, 1000 * HIDDEN_SECONDS);
}

function disconnect() {
  connection?.abort();
  connection = null;
  showStatus("hidden");
}

// ---- the status line

const STATUS = {
  live: "Live",
  lost: "Connection lost, trying again",
  refused: "This server requires an API key",
  hidden: "Paused while hidden",
};
const RATE_SECONDS = 2; // the speed is an average over this time
let recent = []; // [{time, tokens, steps}] per message
let rateTimer = null, server = null, block_size = null;

function showStatus(state) {
  const status = byId("status");
  status.hidden = false;
  if (status.dataset.state === state) return;
  status.dataset.state = state;
  status.textContent = STATUS[state];
  rateTimer ??= setInterval(showRates, 1000);
}

/** `description` is {model, show_text, can_prompt, can_chat, stop, run}. Another `run` means that the server was
 * restarted. Only a server's page loads the chat, so notebooks/pool.html does without it.
 */
function describeServer(description) {
  if (server && server.run !== description.run) endRun();
  server = description;
  document.title = `${server.model}: the pool, live`;
  if (server.can_prompt) import("./chat.js").then(({ showChat }) => showChat(description));
  describePool({ block_size });
}

function describePool(pool) {
  block_size = pool.block_size;
  if (!server) return;
  const tokens = block_size ? ` for ${block_size} tokens` : "";
  const squares = `Each square is a block of memory${tokens}, and each color is a request.`;
  const hidden = server.show_text ? "" : " Start the server with --show-text to see texts.";
  byId("lead").textContent = `This server runs ${server.model}. ${squares}${hidden}`;
}

function countRates(events) {
  const count = (kind) => events.filter((event) => event.kind === kind).length;
  recent.push({ time: now(), tokens: count("token"), steps: count("step") });
}

function showRates() {
  recent = recent.filter(({ time }) => time > now() - RATE_SECONDS);
  const rate = (name) => Math.round(recent.reduce((total, each) => total + each[name], 0) / RATE_SECONDS);
  const rates = recent.length ? `${rate("tokens")} tokens/s, ${rate("steps")} steps/s` : "idle";
  byId("speed").textContent = byId("status").dataset.state === "live" ? rates : "";
}
