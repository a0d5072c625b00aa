"use strict";

/* The runs that the page can show: one for each recorded stage, or one that is still going on. */
const Runs = (() => {
  const all = []; // {name, title, idea, moments, sources, isLive, tape}
  let isOver = false; // the live one: what comes next is another
  const PLAIN = { idea: "", moments: [], sources: {} };

  /** A snapshot begins a run, any other event goes on with the last one. Returns true if there is more to show.
   *
   * `about` is what is known of a recorded run. Without it the run is live; another snapshot of the same pool goes on
   * with it, as after a lost connection. One of another pool, or after end(), takes its place.
   */
  function add(event, about = null) {
    const last = all.at(-1), isGoingOn = !about && !isOver && last?.isLive && last.tape.goesOnWith(event);
    if (event.kind !== "snapshot" || isGoingOn) return last.tape.add(event);
    if (!about) all.length = 0;
    isOver = false;
    const tape = about ? new Tape(event) : new LiveTape(event);
    all.push({ ...PLAIN, name: event.stage, title: event.stage, isLive: !about, ...about, tape });
    return true;
  }

  /** The server was started again: what it did before is no part of its next snapshot's run. */
  const end = () => { isOver = true; };

  /** The last step of the longest run: so that each step is there in all of them. */
  const length = () => Math.max(...all.map(({ tape }) => tape.length));

  return { all, add, end, length };
})();
