"use strict";

/* To follow a run that is still going on. It shows the last step as events come, and stops where the reader looks back.
 *
 * A server may do 200 steps a second: the page is painted at most once for each message, and each sentence stays for a
 * moment. It tells the most unusual event since the one before.
 */
const Follow = (() => {
  const MILLISECONDS_A_SENTENCE = 1600, MILLISECONDS_OF_REST = 4000;
  const REST = "Nobody is here. Send a prompt, and watch its blocks.";
  let isOn = true, isDue = false, painted = 0, told = 0, toldAt = 0, cost = 0, rest = null;

  /** There is more to show. Painting takes at most a quarter of the time. */
  function due() {
    if (isDue) return;
    isDue = true;
    setTimeout(() => requestAnimationFrame(paint), 3 * cost);
  }

  function paint() {
    const began = performance.now(), { at } = Reader, { tape } = Runs.all[at.stage];
    isDue = false;
    if (isOn) showLast(at, tape, began);
    else Reader.show(); // the line of time has grown
    cost = performance.now() - began;
  }

  function showLast(at, tape, now) {
    const isTime = now - toldAt >= MILLISECONDS_A_SENTENCE && told < tape.length;
    Object.assign(at, { step: tape.length, since: Math.min(painted, tape.length), told: isTime ? told : null });
    Reader.letGo(tape.frameAt(tape.length).state);
    Reader.show();
    painted = tape.length;
    if (isTime) [told, toldAt] = [tape.length, now];
    clearTimeout(rest);
    rest = setTimeout(() => settle(at, tape), MILLISECONDS_A_SENTENCE);
  }

  /** Nothing more has come: what is still to be told, and then that nobody is here. */
  function settle(at, tape) {
    if (!isOn) return;
    if (told < tape.length) {
      due();
      return;
    }
    const { running, waiting } = tape.frameAt(tape.length).state;
    if (running.length + waiting.length > 0) return;
    rest = setTimeout(sayRest, MILLISECONDS_OF_REST - MILLISECONDS_A_SENTENCE);
  }

  function sayRest() {
    if (isOn) Dom.byId("sentence").textContent = REST;
  }

  function start() {
    isOn = true;
    told = painted = Runs.length();
    Time.stop();
    paint();
    Time.told();
  }

  function stop() {
    isOn = false;
    Object.assign(Reader.at, { since: undefined, told: undefined });
    Time.told();
  }

  /** A new run: it is followed from its beginning. */
  function begin() {
    [isOn, painted, told, toldAt] = [true, 0, 0, 0];
    Object.assign(Reader.at, { step: 0, block: null, owner: null });
    sayRest();
    Time.told();
  }

  const isFollowing = () => isOn && Runs.all.at(-1)?.isLive === true;

  return { due, start, stop, begin, isFollowing };
})();
