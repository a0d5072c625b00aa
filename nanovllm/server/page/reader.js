"use strict";

/* The reader: where they are, and the five things that they can do: go through time, play, switch the stage, choose a
 * block, and answer a prediction.
 */
const Reader = (() => {
  const at = { stage: 0, step: 0, block: null, owner: null }; // owner: whose block was chosen for the reader

  const run = () => Runs.all[at.stage];

  function show() {
    at.step = Math.max(at.step, run().tape.first); // a live run forgets its beginning
    View.show(run(), at);
    Tabs.show(at.stage);
    if (!run().isLive) Address.write(at);
  }

  /** Asks nothing: for playing and scrubbing. */
  function move(step) {
    if (run().isLive) Follow.stop();
    at.step = Math.max(0, Math.min(step, Runs.length()));
    Quiz.clear();
    show();
  }

  function goTo(step) {
    Time.stop();
    move(step);
    offer();
  }

  /** A question is asked where its moment is next. Whoever has answered it can read the answer again after it. */
  function offer() {
    const moment = (step) => run().moments.find((each) => each.step === step);
    const now = moment(at.step), next = moment(at.step + 1);
    if (now && Quiz.isAnswered(now)) Quiz.reveal(now);
    else if (next && !Quiz.isAnswered(next)) ask(next);
  }

  const ask = (moment) => Quiz.ask(moment, () => goToMoment(moment));

  /** The block to look at is chosen after the answer: it could tell it. */
  function goToMoment(moment) {
    const isAnswered = Quiz.isAnswered(moment);
    at.block = isAnswered ? moment.block : null;
    goTo(isAnswered ? moment.step : moment.step - 1);
    if (!isAnswered) ask(moment); // an answer to the moment before may stand there
  }

  /** At the end of a live run the reader follows it again. */
  function scrub(step) {
    Time.stop();
    if (run().isLive && step >= Runs.length()) Follow.start();
    else move(step);
  }

  function playOrPause() {
    if (Time.isPlaying() || Follow.isFollowing()) return goTo(at.step);
    if (at.step >= Runs.length() && run().isLive) return Follow.start();
    if (at.step >= Runs.length()) move(0);
    Quiz.clear();
    Time.play(() => {
      move(at.step + 1);
      return at.step < Runs.length();
    });
  }

  function switchTo(stage) {
    at.stage = stage;
    at.block = null;
    goTo(at.step);
  }

  /** The block that is chosen already is let go. */
  function choose(block) {
    Object.assign(at, { block: at.block === block ? null : block, owner: null });
    show();
  }

  /** What was chosen for the reader is let go when it is another sequence's. */
  function letGo({ running, sequences }) {
    const has = (seq) => sequences[seq]?.block_table.includes(at.block);
    if (at.owner === null || has(at.owner) || !running.some(has)) return;
    Object.assign(at, { block: null, owner: null });
  }

  function restore() {
    if (run().isLive) return Follow.begin();
    Object.assign(at, Address.read(Runs.all.length, Runs.length()) ?? {});
    goTo(at.step);
  }

  return { at, goTo, goToMoment, scrub, offer, playOrPause, switchTo, choose, letGo, restore, show };
})();
