"use strict";

/* Where the reader is, in the address: #s5/31/b17 is stage 5, step 31, block 17; bh3 is block 3 of the host. */
const Address = (() => {
  const MILLISECONDS = 200; // a browser may refuse many changes in a short time
  let timer = null, wanted = "";

  function write({ stage, step, block }) {
    wanted = `#s${stage + 1}/${step}${block === null ? "" : `/b${block}`}`;
    timer ??= setTimeout(flush, MILLISECONDS);
  }

  function flush() {
    clearTimeout(timer);
    timer = null;
    if (wanted && wanted !== location.hash) history.replaceState(null, "", wanted);
  }

  /** null if it names no place; a stage or a step that is not there is the nearest one. */
  function read(num_stages, length) {
    clearTimeout(timer);
    timer = null;
    const found = /^#s(\d+)\/(\d+)(?:\/b(h?\d+))?$/.exec(location.hash);
    if (!found) return null;
    const [, number, step, block] = found;
    return {
      stage: Math.max(1, Math.min(Number(number), num_stages)) - 1,
      step: Math.min(Number(step), length),
      block: block === undefined || block.startsWith("h") ? block ?? null : Number(block),
    };
  }

  addEventListener("pagehide", flush);

  return { write, read, flush };
})();
