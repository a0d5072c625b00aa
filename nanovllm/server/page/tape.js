/* Runs and their tapes: the events of a run, step by step, and the frame at any step. */

import { shareHeld } from "./cells.js";
import { advance, begin, inPlace, prune } from "./reducer.js";

/** The runs that the page can show: one for each recorded stage, or the live one. */
export const runs = []; // {name, title, idea, moments, sources, isLive, tape, verdict}; a learner's has a verdict
let hasEnded = false; // true if the live run has ended, so that the next snapshot begins another one

/** Add an event. Return true if there is something new to show.
 *
 * A snapshot begins a run, and any other event belongs to the last run. `about` describes a recorded run; other runs
 * are live. A snapshot of the same pool, as after a lost connection, continues a live run. A snapshot of another pool,
 * or one after endRun(), replaces it.
 */
export function addEvent(event, about = null) {
  const last = runs.at(-1), isContinued = !about && !hasEnded && last?.isLive && last.tape.isOfSamePool(event);
  if (event.kind !== "snapshot" || isContinued) return last.tape.add(event);
  if (!about) runs.length = 0;
  hasEnded = false;
  const title = event.stage, tape = new Tape(event, { isLive: !about });
  runs.push({ name: title, title, idea: "", moments: [], sources: {}, isLive: !about, ...about, tape });
  return true;
}

/** End the live run: the server was restarted, so its next snapshot begins another run. */
export const endRun = () => { hasEnded = true; };

/** Return the last step of the longest run, which is the end of the timeline for all of them. */
export const lastStep = () => Math.max(...runs.map(({ tape }) => tape.length));

/** Yield the snapshot and the events of a recorded run from the compact form of notebooks/page/build.py.
 *
 *     kinds     {taken: ["block", "seq$", "index", "why$", "by$"], ...}: the columns; $ marks an index into `strings`
 *     strings   each text once
 *     events    [[kind's index, one value per column, ...], ...]; steps are counted here
 */
export function* unpack({ kinds, strings }, { snapshot, events }) {
  const names = Object.keys(kinds);
  let step = 1;
  yield snapshot;
  for (const [number, ...values] of events) {
    const kind = names[number], event = { kind, step };
    kinds[kind].forEach((column, i) => {
      const isText = column.endsWith("$"), value = values[i] ?? null;
      event[isText ? column.slice(0, -1) : column] = isText && value !== null ? strings[value] : value;
    });
    yield event;
    if (kind === "step") step += 1;
  }
}

export const now = () => performance.now() / 1000; // in seconds

/** The events of a run, with a keyframe every 32 steps, so that any frame can be computed from at most 31 steps.
 *
 * A live tape keeps the last minutes, within a limit on memory. It drops its oldest steps, and then begins with the
 * first keyframe that is left.
 */
export class Tape {
  static KEYFRAME_INTERVAL = 32;
  static MAX_SECONDS = 300;
  static MAX_WEIGHT = 300_000; // an event weighs 1 and takes about 150 bytes

  constructor(snapshot, { isLive = false } = {}) {
    this.snapshot = snapshot;
    this.first = 0; // the first step that is kept
    this.kinds = new Set(); // of all events so far, including forgotten ones
    this.weight = 0;
    this.isLive = isLive;
    this.steps = []; // the events of each complete step; steps[0] is step first + 1
    this.openStep = []; // the events of the step in progress
    this.keyframes = [begin(snapshot)];
    this.latest = { step: 0, frame: this.keyframes[0] }; // the most recently computed frame
    this.heldShares = []; // after each step, as far as held() has computed them
    this.times = [now()]; // when each step arrived
    this.weights = [];
  }

  get length() {
    return this.first + this.steps.length;
  }

  has(kind) {
    return this.kinds.has(kind);
  }

  /** Add an event. Return true if it completes a step. */
  add(event) {
    this.openStep.push(event);
    this.kinds.add(event.kind);
    if (event.kind === "step") this.closeStep();
    return event.kind === "step";
  }

  /** Close the step in progress without waiting for its last event, which may never come. */
  settle() {
    if (this.openStep.length) this.closeStep();
  }

  closeStep() {
    const weight = this.weightOf(this.openStep);
    this.weight += weight;
    this.weights.push(weight);
    this.times.push(now());
    this.steps.push(this.openStep);
    this.openStep = [];
    if ((this.length - this.first) % Tape.KEYFRAME_INTERVAL === 0) this.addKeyframe();
    while (this.isLive && this.isTooLong()) this.forget();
  }

  addKeyframe() {
    this.latest = { step: this.length, frame: prune(this.frameAt(this.length)) };
    this.keyframes.push(this.latest.frame);
  }

  /** Return the weight of a step: its events, and its share of the next keyframe. */
  weightOf(events) {
    const num_tokens = events.reduce((sum, event) => sum + (event.tokens?.length ?? 0), 0);
    const num_blocks = this.snapshot.pool.num_blocks + (this.snapshot.host?.num_blocks ?? 0);
    return events.length + num_tokens / 8 + num_blocks / (4 * Tape.KEYFRAME_INTERVAL);
  }

  isTooLong() {
    if (this.steps.length < 2 * Tape.KEYFRAME_INTERVAL) return false;
    return this.weight > Tape.MAX_WEIGHT || this.secondsAgo(this.first + Tape.KEYFRAME_INTERVAL) > Tape.MAX_SECONDS;
  }

  /** Drop the steps before the second keyframe. */
  forget() {
    for (const list of [this.steps, this.heldShares, this.times]) list.splice(0, Tape.KEYFRAME_INTERVAL);
    for (const weight of this.weights.splice(0, Tape.KEYFRAME_INTERVAL)) this.weight -= weight;
    this.keyframes.shift();
    this.first += Tape.KEYFRAME_INTERVAL;
    if (this.latest.step < this.first) this.latest = { step: this.first, frame: this.keyframes[0] };
  }

  secondsAgo(step) {
    return now() - this.times[step - this.first];
  }

  isOfSamePool({ pool, host }) {
    return JSON.stringify([this.snapshot.pool, this.snapshot.host]) === JSON.stringify([pool, host]);
  }

  /** Return the events of a step. */
  eventsOf(step) {
    return this.steps[step - 1 - this.first] ?? [];
  }

  /** Return the events of the steps after `start`, up to and including `step`. */
  eventsBetween(start, step) {
    return this.steps.slice(Math.max(0, start - this.first), step - this.first).flat();
  }

  /** Return the frame after a step; step 0 is before the first event. */
  frameAt(step) {
    step = Math.max(this.first, Math.min(step, this.length));
    const i = Math.min(Math.floor((step - this.first) / Tape.KEYFRAME_INTERVAL), this.keyframes.length - 1);
    const keyStep = this.first + i * Tape.KEYFRAME_INTERVAL, { step: latest } = this.latest;
    const from = keyStep <= latest && latest <= step ? this.latest : { step: keyStep, frame: this.keyframes[i] };
    this.latest = { step, frame: from.step < step ? this.play(from, step) : from.frame };
    return this.latest.frame;
  }

  /** Return the frame after `end`, from the one at an earlier step. `see` gets each frame in between, and keeps none. */
  play({ step, frame }, end, see = () => {}) {
    return inPlace(() => {
      for (; step < end; step += 1) {
        frame = this.eventsOf(step + 1).reduce(advance, frame);
        see(frame);
      }
      return frame;
    });
  }

  /** Return the share of the pool that was held after each step, from the first one on. */
  held() {
    const from = Math.max(this.first + this.heldShares.length - 1, this.first), frame = this.frameAt(from);
    const see = ({ state }) => this.heldShares.push(shareHeld(state));
    if (!this.heldShares.length) see(frame);
    if (from < this.length) {
      this.latest = { step: this.length, frame: this.play({ step: from, frame }, this.length, see) };
    }
    return this.heldShares;
  }
}
