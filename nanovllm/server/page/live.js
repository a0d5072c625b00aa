/* The page of a server: its events, its status, its API key, and a prompt to try. */

import { byId, fill, make, tag } from "./dom.js";
import { chooseFor, feed, liveFrame, settle } from "./reader.js";
import { endRun, now } from "./tape.js";

// ---- HTTP: the API key, and server-sent events. An EventSource could send neither a key nor a prompt.

const KEY_HINT = "Use a key that the server was started with (--api-key).";
let key = ""; // kept only until the page is closed

const withKey = (headers = {}) => (key ? { ...headers, Authorization: `Bearer ${key}` } : headers);

/** Ask the user for an API key, and then call `retry()`. */
function askForKey(retry) {
  const form = byId("key-form");
  form.hidden = false;
  byId("key-hint").textContent = key ? `This key is not valid. ${KEY_HINT}` : KEY_HINT;
  form.onsubmit = (event) => {
    event.preventDefault();
    key = byId("key").value.trim();
    form.hidden = true;
    retry();
  };
}

/** Yield {event, data} for each message of the response, until it ends. Throw the server's error, if it sent one. */
async function* messagesOf(response) {
  if (!response.ok) {
    const body = await response.json().catch(() => null);
    throw new Error(body?.error?.message ?? `the server answered ${response.status}`);
  }
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const blocks = (text + value).split("\n\n");
    text = blocks.pop();
    for (const block of blocks) {
      const values = (name) => block.split("\n").filter((line) => line.startsWith(`${name}:`))
        .map((line) => line.slice(name.length + 1).replace(/^ /, ""));
      const data = values("data"); // a comment, which keeps the connection open, has none
      if (data.length) yield { event: values("event")[0] ?? "message", data: data.join("\n") };
    }
  }
}

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

/** `description` is {model, show_text, can_prompt, run}. Another `run` means that the server was restarted. */
function describeServer(description) {
  if (server && server.run !== description.run) endRun();
  server = description;
  document.title = `${server.model}: the pool, live`;
  byId("prompt").hidden = !server.can_prompt;
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

// ---- a prompt: the page shows its text as it is generated, and its blocks

let generation = null; // the AbortController of the prompt that is running

/** Prepare the prompt's form. Its button sends a prompt, or stops the one that is running. */
export function preparePrompt() {
  byId("ask").addEventListener("submit", (event) => {
    event.preventDefault();
    if (generation) generation.abort();
    else send();
  });
  byId("words").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) byId("ask").requestSubmit();
  });
}

async function send() {
  const began = performance.now(), answer = { tag: null, firstAfter: null, num_tokens: null };
  const prompt = byId("words").value, max_tokens = Number(byId("most").value);
  const body = { model: server.model, prompt, max_tokens, stream: true, stream_options: { include_usage: true } };
  const headers = withKey({ "Content-Type": "application/json" });
  generation = new AbortController();
  byId("send").textContent = "Stop";
  fill("answer", make("span", { class: "prompt" }, prompt));
  fill("answered");
  try {
    const options = { method: "POST", headers, body: JSON.stringify(body), signal: generation.signal };
    const response = await fetch("v1/completions", options);
    if (response.status === 401) return askForKey(send);
    for await (const { data } of messagesOf(response)) if (data !== "[DONE]") read(JSON.parse(data), answer, began);
    fill("answered", answer.tag, summary(answer, began));
  } catch (error) {
    const failure = `The request failed: ${error.message.replace(/\.$/, "")}.`;
    fill("answered", error.name === "AbortError" ? "Stopped: its blocks are free again." : failure);
  } finally {
    generation = null;
    byId("send").textContent = "Send";
  }
}

/** Add a chunk of the response to `answer`, and show its text. */
function read({ id, error, choices, usage }, answer, began) {
  if (error) throw new Error(error.message);
  chooseFirstBlock(id, answer);
  const text = choices?.[0]?.text ?? "";
  if (text) answer.firstAfter ??= performance.now() - began;
  answer.num_tokens = usage?.completion_tokens ?? answer.num_tokens;
  byId("answer").append(text);
  byId("answer").scrollTop = byId("answer").scrollHeight;
}

/** Select the request's first block as soon as it exists, so that the page draws the block table as it grows. */
function chooseFirstBlock(id, answer) {
  const frame = liveFrame(), block = frame?.state.sequences[id]?.block_table[0];
  if (answer.tag || block === undefined) return;
  answer.tag = tag(frame.memory, id);
  chooseFor(id, block);
}

function summary({ num_tokens, firstAfter }, began) {
  const seconds = (performance.now() - began) / 1000, count = num_tokens === null ? "Done" : `${num_tokens} tokens`;
  const first = firstAfter === null ? "" : `, the first text after ${Math.round(firstAfter)} ms`;
  return `${count} in ${seconds.toFixed(2)} s${first}.`;
}
