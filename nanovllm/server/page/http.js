/* Requests to the server: its API key, and answers in server-sent events. An EventSource could send neither a key nor a
 * message.
 */

import { byId } from "./dom.js";

const KEY_HINT = "Use a key that the server was started with (--api-key).";
let key = ""; // kept only until the page is closed

export const withKey = (headers = {}) => (key ? { ...headers, Authorization: `Bearer ${key}` } : headers);

/** Ask the user for an API key, and then call `retry()`. */
export function askForKey(retry) {
  const form = byId("key-form");
  form.hidden = false;
  byId("key").focus();
  byId("key-hint").textContent = key ? `This key is not valid. ${KEY_HINT}` : KEY_HINT;
  form.onsubmit = (event) => {
    event.preventDefault();
    key = byId("key").value.trim();
    form.hidden = true;
    retry();
  };
}

/** Yield {event, data} for each message of the response, until it ends. Throw the server's error, if it sent one. */
export async function* messagesOf(response) {
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
