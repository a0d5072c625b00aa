/* The sequences: running, waiting and done, each with the end of its text. Only the prompt is pale. */

import { byId, fill, label, make, tag } from "./dom.js";
import { waitReason } from "./words.js";

const MAX_CHARACTERS = 90; // the end of the text, which is the part that changes
const MAX_ROWS = 16, MAX_DONE = 40; // a server may have hundreds of sequences

/** `marked` are the sequences to highlight. */
export function showQueues(frame, events, selected, marked = []) {
  const { state, memory } = frame;
  for (const [id, reasonFor] of [["running", () => null], ["waiting", (seq) => reasonToWait(memory, seq, events)]]) {
    const rows = firstRows(state[id], selected).map((seq) => makeRow(frame, seq, reasonFor(seq), [seq === selected && "selected", marked.includes(seq) && "marked"]));
    const more = state[id].length - rows.length;
    if (more) rows.push(make("li", { class: "note" }, `and ${more} more`));
    showQueue(id, rows, state[id].length);
  }
  const ended = Object.keys(memory.ended);
  const done = ended.slice(-MAX_DONE).map((seq) => makeDone(memory, seq));
  showQueue("done", done, ended.length > MAX_DONE ? "" : ended.length);
}

function showQueue(id, rows, count) {
  fill(id, ...(rows.length ? rows : [make("li", { class: "note" }, "none")]));
  byId(id).closest("details").querySelector("h2").dataset.count = count;
}

/** Return the names to show: the selected sequence is always one of them. */
function firstRows(names, selected) {
  const first = names.slice(0, MAX_ROWS);
  return names.indexOf(selected) >= MAX_ROWS ? [selected, ...first.slice(1)] : first;
}

function makeRow({ state, memory }, seq, reason, looks) {
  const { texts, num_computed_tokens, max_num_tokens } = state.sequences[seq];
  const num_prompt_tokens = memory.prompts[seq] ?? 0, isHidden = texts[0] === null; // the server does not show texts
  const title = `${num_computed_tokens} of at most ${max_num_tokens} tokens are in the pool`;
  return make("li", { class: looks.filter(Boolean).join(" ") || null },
    tag(memory, seq),
    isHidden ? makeBar(num_computed_tokens, max_num_tokens, num_prompt_tokens)
      : make("span", { class: "words" }, makeLastWords(texts, num_prompt_tokens)),
    make("span", { class: "share", title }, `${num_computed_tokens} / ${max_num_tokens}`),
    reason ? make("span", { class: "facts" }, reason) : null);
}

/** Create a bar as long as the sequence may become: its prompt tokens, then its generated tokens. */
function makeBar(num_tokens, max_num_tokens, num_prompt_tokens) {
  const share = (tokens) => `width:${((100 * tokens) / max_num_tokens).toFixed(2)}%`;
  const num_given = Math.min(num_tokens, num_prompt_tokens);
  return make("span", { class: "progress" }, make("span", { class: "given", style: share(num_given) }),
    make("span", { class: "generated", style: share(num_tokens - num_given) }));
}

function makeLastWords(texts, num_prompt_tokens) {
  const line = (pieces) => pieces.join("").replaceAll("\n", " ");
  const prompt = line(texts.slice(0, num_prompt_tokens)), output = line(texts.slice(num_prompt_tokens));
  const cut = Math.max(0, prompt.length + output.length - MAX_CHARACTERS);
  const given = make("span", { class: "prompt" }, prompt.slice(cut));
  return make("span", {}, given, output.slice(Math.max(0, cut - prompt.length)));
}

/** Return why a sequence waits, or null. The engine reports a reason only for the first one in the queue. */
function reasonToWait(memory, seq, events) {
  const heldUp = events.find((event) => event.kind === "held_up" && event.seq === seq);
  return heldUp ? waitReason(heldUp, label(memory, seq)) : null;
}

/** Create a row for a finished sequence. A word tells if it did not end normally. */
function makeDone(memory, seq) {
  const word = { abort: "aborted", error: "failed" }[memory.ended[seq]];
  return make("li", {}, tag(memory, seq), word ? make("span", { class: "facts" }, word) : null);
}
