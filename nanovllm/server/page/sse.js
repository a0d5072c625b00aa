"use strict";

/* Server-sent events of an answer that fetch() gives. An EventSource could not send a key, nor a prompt. */
const Sse = (() => {
  /** Yields {event, data} for each message of the answer's body, until it ends. */
  async function* messages(response) {
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    let text = "";
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const blocks = (text + value).split("\n\n");
      text = blocks.pop();
      for (const block of blocks) if (hasData(block)) yield message(block);
    }
  }

  const hasData = (block) => /^data:/m.test(block); // else it is a comment that keeps the connection

  function message(block) {
    const values = (name) => block.split("\n").filter((line) => line.startsWith(`${name}:`))
      .map((line) => line.slice(name.length + 1).replace(/^ /, ""));
    return { event: values("event")[0] ?? "message", data: values("data").join("\n") };
  }

  /** What went wrong, as the server says it: OpenAI's form of an error, or a status. */
  async function errorOf(response) {
    const body = await response.json().catch(() => null);
    return body?.error?.message ?? `the server answered ${response.status}`;
  }

  return { messages, errorOf };
})();
