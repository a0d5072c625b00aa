/* The chat: a conversation with the model, and what the cache gave to each turn. Only the page of a server loads it.
 *
 * A turn is a message with an answer for each sample. While it runs, its blocks light up in the pool. The history that
 * the next turn sends has one answer of each turn: the first one, or the one that the reader chose. A model without a
 * chat template gets the text of the message, and nothing else.
 */

import { byId, fill, make, tag } from "./dom.js";
import { askForKey, messagesOf, withKey } from "./http.js";
import { watch } from "./reader.js";
import { requestOf } from "./reducer.js";

const EMPTY = "Send a message: its blocks light up in the pool. The next one finds them in the cache.";
const NEAR = 40; // pixels from the end; a reader who has scrolled further up stays there

let server = null; // {can_chat, stop, ...}, as /events describes it
let turns = [];
let running = null; // the turn whose answers are on their way

/** Show the chat, and adapt it to the server, which may have been restarted with other options. */
export function showChat(description) {
  if (!server) prepare();
  server = description;
  byId("chat").hidden = false;
  byId("stage").classList.add("with-chat");
  byId("system-part").hidden = !server.can_chat;
  byId("chat-note").hidden = server.can_chat;
}

function prepare() {
  byId("ask").addEventListener("submit", (event) => {
    event.preventDefault();
    if (!running) send();
  });
  byId("words").addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    if (!running) byId("ask").requestSubmit();
  });
  byId("words").addEventListener("focus", ({ target }) => target.select(), { once: true }); // typing replaces the example
  byId("send").addEventListener("click", () => running?.stop());
  byId("chat").addEventListener("keydown", ({ key }) => { if (key === "Escape") running?.stop(); });
  byId("new-chat").addEventListener("click", startOver);
  startOver();
}

/** Forget the conversation. A turn that is running stops. */
function startOver() {
  running?.stop();
  showRunning(null);
  turns = [];
  fill("turns", make("li", { class: "hint" }, EMPTY));
  fill("chat-news");
  if (server) byId("words").focus();
}

/** Make the button stop the turn that is running, or send the next one. */
function showRunning(turn) {
  running = turn;
  byId("send").textContent = turn ? "Stop" : "Send";
  byId("send").type = turn ? "button" : "submit"; // so that Enter in a field never stops a turn
}

// ---- a turn

async function send() {
  const text = byId("words").value;
  if (!text.trim()) return;
  const turn = new Turn(text, Number(new FormData(byId("ask")).get("n"))), request = requestFor(turn);
  turns.at(-1)?.settle();
  if (!turns.length) fill("turns");
  turns.push(turn);
  byId("turns").append(turn.element);
  byId("turns").scrollTop = byId("turns").scrollHeight;
  if (server.can_chat) byId("words").value = "";
  fill("chat-news");
  showRunning(turn);
  const isAllowed = await turn.run(request);
  if (turn !== running) return; // a new chat has begun
  showRunning(null);
  if (!turn.isInHistory && !byId("words").value) byId("words").value = turn.text; // to send it again
  byId("chat-news").textContent = turn.summary(); // a screen reader reads it once
  if (!isAllowed) askForKey(send);
}

/** Return the path and the body of the request for a turn. */
function requestFor({ text, answers: { length: n } }) {
  const max_tokens = Number(byId("most").value), stream_options = { include_usage: true, continuous_usage_stats: true };
  const body = { model: server.model, n, max_tokens, stream: true, stream_options };
  if (!server.can_chat) return ["v1/completions", { ...body, prompt: text }];
  const system = byId("system").value, first = system.trim() ? [{ role: "system", content: system }] : [];
  const messages = [...first, ...turns.flatMap((turn) => turn.messages()), { role: "user", content: text }];
  const stop = server.stop.length ? { stop: server.stop } : {};
  return ["v1/chat/completions", { ...body, ...stop, messages }];
}

/** A message, its answers, and their list item on the page. */
class Turn {
  constructor(text, num_samples) {
    Object.assign(this, { text, id: null, usage: null, first: null, last: null, num_shared: 0, chosen: 0, box: null });
    this.end = null; // how it ended: "" if the answers are complete
    this.hasFailed = false;
    this.connection = new AbortController();
    this.answers = Array.from({ length: num_samples }, (_, i) => new Answer(num_samples > 1 ? i : null));
    this.facts = make("p", { class: "facts" }, "Waiting for the first token");
    this.element = make("li", { class: "turn", "aria-busy": "true" },
      make("p", { class: "message" }, unseen("You: "), text), this.makeAnswers(), this.facts);
  }

  /** Create the box of the answers. If there are several, the reader chooses one. */
  makeAnswers() {
    const boxes = this.answers.map(({ element }) => element);
    if (boxes.length === 1) return boxes[0];
    const legend = make("legend", { class: "unseen" }, "Which answer continues the chat?");
    this.choices = this.answers.map((answer, i) => {
      const choice = make("input", { type: "radio", name: `choice-${turns.length}`, value: i });
      choice.addEventListener("change", () => this.choose(i));
      answer.head.append(make("label", {}, choice, "continue", unseen(` with answer ${i + 1}`)));
      return choice;
    });
    this.box = make("fieldset", { class: "answers" }, legend, ...boxes);
    this.choose(0);
    return this.box;
  }

  choose(i) {
    this.chosen = i;
    this.choices[i].checked = true;
    this.answers.forEach(({ element }, other) => element.classList.toggle("chosen", other === i));
  }

  /** Keep the choice, because the next turn builds on it. */
  settle() {
    if (this.box) this.box.disabled = true;
  }

  /** Return the messages that this turn adds to the history. A turn without an answer adds none. */
  messages() {
    if (!this.isInHistory) return [];
    return [{ role: "user", content: this.text }, { role: "assistant", content: this.answers[this.chosen].said }];
  }

  get isInHistory() {
    return this.end !== null && !this.hasFailed && this.answers[this.chosen].said !== "";
  }

  stop() {
    this.connection.abort();
  }

  /** Send the request and show the answers as they come. Return false if it needs an API key. */
  async run([path, body]) {
    const began = performance.now(), headers = withKey({ "Content-Type": "application/json" });
    const options = { method: "POST", headers, body: JSON.stringify(body), signal: this.connection.signal };
    let isAllowed = true;
    try {
      const response = await fetch(path, options);
      isAllowed = response.status !== 401;
      for await (const { data } of messagesOf(response)) if (data !== "[DONE]") this.read(JSON.parse(data), began);
      this.end = "";
    } catch ({ name, message }) {
      this.hasFailed = name !== "AbortError";
      this.end = this.hasFailed ? `The request failed: ${message.replace(/\.$/, "")}.` : "stopped: its blocks are free again";
    }
    this.element.setAttribute("aria-busy", "false");
    keepAtEnd(() => this.showFacts());
    return isAllowed;
  }

  /** Show a chunk of the response. */
  read({ id, error, choices, usage }, began) {
    if (error) throw new Error(error.message);
    if (this.id === null) {
      this.id = id;
      watch(id, (frame) => this.see(frame));
    }
    this.usage = usage ?? this.usage;
    if (choices.length && this.usage) {
      this.last = { seconds: (performance.now() - began) / 1000, num_tokens: this.usage.completion_tokens };
      this.first ??= this.last;
    }
    keepAtEnd(() => {
      for (const { index, ...choice } of choices) this.answers[index].add(choice);
      this.showFacts();
    });
  }

  /** Look at the turn's sequences in a frame: their colors, and the blocks that they share since the fork. */
  see({ state, memory }) {
    if (!(this.id in memory.places)) return;
    this.answers.forEach((answer) => answer.showTag(memory, this.id));
    const own = state.running.filter((seq) => requestOf(seq) === this.id), counts = {};
    for (const block of own.flatMap((seq) => state.sequences[seq].block_table)) counts[block] = (counts[block] ?? 0) + 1;
    const num_shared = Object.values(counts).filter((num_holders) => num_holders > 1).length;
    if (num_shared <= this.num_shared) return;
    this.num_shared = num_shared;
    this.showFacts();
  }

  showFacts() {
    const parts = this.parts(), { usage } = this;
    if (!parts.length) return;
    const share = usage ? usage.prompt_tokens_details.cached_tokens / Math.max(usage.prompt_tokens, 1) : 0;
    const bar = make("span", { class: "progress", "aria-hidden": "true" },
      make("span", { class: "generated", style: `width:${(100 * share).toFixed(1)}%` }));
    this.facts.replaceChildren(...(usage ? [bar] : []), parts.join(", "));
  }

  /** Return what is known about the turn so far: "64 of 82 prompt tokens cached", "23 tokens", and so on. */
  parts() {
    const { usage, first, last, num_shared, answers, end, hasFailed } = this, parts = [];
    if (hasFailed) return [end];
    if (usage) {
      const { prompt_tokens, completion_tokens, prompt_tokens_details: { cached_tokens } } = usage;
      const rate = (last.num_tokens - first.num_tokens) / (last.seconds - first.seconds);
      parts.push(`${cached_tokens} of ${prompt_tokens} prompt tokens cached`, count(completion_tokens, "token"));
      if (rate > 0 && rate < Infinity) parts.push(`${Math.round(rate)} tokens/s`);
      parts.push(`the first after ${Math.round(1000 * first.seconds)} ms`);
    }
    if (num_shared) parts.push(`${count(num_shared, "block")} shared`);
    if (end === "" && answers.some(({ isCut }) => isCut)) parts.push("cut off at max tokens");
    if (end) parts.push(end);
    return parts;
  }

  /** Return what a screen reader reads once the turn is over. */
  summary() {
    const facts = this.parts().join(", "), { length } = this.answers;
    if (length > 1 && this.isInHistory) return `${length} answers. Choose the one that continues the chat. ${facts}`;
    return `${this.answers[this.chosen].said} ${facts}`;
  }
}

/** The answer of one sample. `index` is null if it is the only one. */
class Answer {
  constructor(index) {
    this.index = index;
    this.isCut = false; // true if it ended at max_tokens
    this.content = "";
    this.text = new Text(); // the content without blank lines at its start
    this.thought = new Text();
    this.head = make("p", { class: "head" }, make("span", { class: "tag-place" }));
    const name = index === null ? "Answer: " : `Answer ${index + 1}: `;
    const thought = make("span", { class: "thought" }, this.thought);
    this.element = make("div", { class: "answer" }, this.head, make("p", { class: "text" }, unseen(name), thought, this.text));
  }

  /** Add a choice of a chunk. Completions have a text, and chats a delta, which may have a thought. */
  add({ text, delta, finish_reason }) {
    this.content += text ?? delta.content ?? "";
    this.text.data = this.content.trimStart();
    this.thought.appendData(delta?.reasoning ?? "");
    this.isCut ||= finish_reason === "length";
  }

  /** The answer as the history has it. Templates put their own space in front of an answer. */
  get said() {
    return this.content.trim();
  }

  /** Show the letter and the color that the sequence has in the pool. */
  showTag(memory, request) {
    const place = this.head.firstChild;
    if (!place.hasChildNodes()) place.append(tag(memory, this.index === null ? request : `${request}.${this.index}`));
  }
}

/** Change the conversation, and scroll to its end again if the reader was there. */
function keepAtEnd(change) {
  const box = byId("turns"), isAtEnd = box.scrollHeight - box.scrollTop - box.clientHeight < NEAR;
  change();
  if (isAtEnd) box.scrollTop = box.scrollHeight;
}

const count = (number, noun) => `${number} ${noun}${number === 1 ? "" : "s"}`;

/** Create a text for screen readers alone. */
const unseen = (text) => make("span", { class: "unseen" }, text);
