"use strict";

/* The runs that the page can show: one for each recorded stage, or one that is still going on. */
const Runs = (() => {
  const all = []; // {name, title, idea, moments, sources, tape}
  const PLAIN = { idea: "", moments: [], sources: {} };

  /** A snapshot begins a run, any other event goes on with the last one. Returns true if there is more to show. */
  function add(event, about = {}) {
    if (event.kind !== "snapshot") return all.at(-1).tape.add(event);
    all.push({ ...PLAIN, name: event.stage, title: event.stage, ...about, tape: new Tape(event) });
    return true;
  }

  /** The last step of the longest run: so that each step is there in all of them. */
  const length = () => Math.max(...all.map(({ tape }) => tape.length));

  return { all, add, length };
})();
