"use strict";

/* The runs that the page can show: one for each recorded stage, or one that is still going on. */
const Runs = (() => {
  const all = []; // {name, title, idea, moments, sources, isLive, tape}
  const PLAIN = { idea: "", moments: [], sources: {} };

  /** A snapshot begins a run, any other event goes on with the last one. Returns true if there is more to show.
   *
   * `about` is what is known of a recorded run. Without it the run is live; another snapshot of the same pool goes on
   * with it, as after a lost connection, and one of another pool takes its place.
   */
  function add(event, about = null) {
    const last = all.at(-1), isGoingOn = !about && last?.isLive && last.tape.goesOnWith(event);
    if (event.kind !== "snapshot" || isGoingOn) return last.tape.add(event);
    if (!about) all.length = 0;
    const tape = about ? new Tape(event) : new LiveTape(event);
    all.push({ ...PLAIN, name: event.stage, title: event.stage, isLive: !about, ...about, tape });
    return true;
  }

  /** The last step of the longest run: so that each step is there in all of them. */
  const length = () => Math.max(...all.map(({ tape }) => tape.length));

  return { all, add, length };
})();
