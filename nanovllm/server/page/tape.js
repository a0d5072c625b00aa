"use strict";

/* A tape: the events of a run, step by step, and the state at any step.
 *
 * Every 32 steps it keeps the state, a keyframe: wherever the reader goes, at most 31 steps are played again.
 * A run that is still going on is the same: add() puts an event at the end, and forget() drops the oldest steps. The
 * first keyframe that is left is then what the tape begins with.
 */
class Tape {
  static KEYFRAME_EVERY = 32;

  constructor(snapshot) {
    this.snapshot = snapshot;
    this.first = 0; // the step that it begins with: what was before is forgotten
    this.steps = []; // the events of each step that is complete; step 1 is the first
    this.kinds = new Set(); // of events that were ever on it
    this._open = []; // the events of the step that is not
    this._keyframes = [Tape.begin(snapshot)];
    this._last = { step: 0, frame: this._keyframes[0] };
    this._held = []; // the share of the pool that was held after each step, as far as anybody asked
  }

  /** Returns true if the event completes a step. */
  add(event) {
    this._open.push(event);
    this.kinds.add(event.kind);
    if (event.kind === "step") this.close();
    return event.kind === "step";
  }

  /** What is open becomes a step. */
  close() {
    this.steps.push(this._open);
    this._open = [];
    if ((this.length - this.first) % Tape.KEYFRAME_EVERY === 0) this._keep();
  }

  _keep() {
    const { state, memory } = this.frameAt(this.length);
    this._last = { step: this.length, frame: { state, memory: Memory.prune(memory, state) } };
    this._keyframes.push(this._last.frame);
  }

  /** Drop the oldest steps, up to the second keyframe. */
  forget() {
    this.steps.splice(0, Tape.KEYFRAME_EVERY);
    this._held.splice(0, Tape.KEYFRAME_EVERY);
    this._keyframes.shift();
    this.first += Tape.KEYFRAME_EVERY;
    if (this._last.step < this.first) this._last = { step: this.first, frame: this._keyframes[0] };
  }

  get length() {
    return this.first + this.steps.length;
  }

  /** The state after a step, and what is remembered of the past: {state, memory}. Step 0 is before the first event. */
  frameAt(step) {
    step = this._within(step);
    const key = Math.min(Math.floor((step - this.first) / Tape.KEYFRAME_EVERY), this._keyframes.length - 1);
    const from = this.first + key * Tape.KEYFRAME_EVERY, isAhead = this._last.step <= step && this._last.step >= from;
    let { step: at, frame } = isAhead ? this._last : { step: from, frame: this._keyframes[key] };
    if (at < step) frame = this._play(frame, at, step);
    this._last = { step, frame };
    return frame;
  }

  /** From the frame after step `at` to the one after `step`; `see` may look at each in between, and keep none. */
  _play(frame, at, step, see = () => {}) {
    return Reducer.together(() => {
      for (; at < step; at += 1) {
        frame = this.eventsOf(at + 1).reduce(Tape.advance, frame);
        see(frame);
      }
      return frame;
    });
  }

  /** The share of the pool that was held after each step, the first one's too. */
  held() {
    const from = Math.max(this.first + this._held.length - 1, this.first), frame = this.frameAt(from);
    const see = ({ state }) => this._held.push(Cells.shareHeld(state));
    if (!this._held.length) see(frame);
    if (from < this.length) this._last = { step: this.length, frame: this._play(frame, from, this.length, see) };
    return this._held;
  }

  /** Whether an event of this kind is on it. */
  has(kind) {
    return this.kinds.has(kind);
  }

  eventsOf(step) {
    return this.steps[step - 1 - this.first] ?? [];
  }

  /** The events of all steps behind `after`, up to `step`. */
  eventsBetween(after, step) {
    return this.steps.slice(Math.max(0, after - this.first), step - this.first).flat();
  }

  _within(step) {
    return Math.max(this.first, Math.min(step, this.length));
  }

  static begin(snapshot) {
    const state = Reducer.apply(null, snapshot);
    return { state, memory: Memory.begin(state) };
  }

  static advance({ state, memory }, event) {
    const after = Reducer.apply(state, event);
    return { state: after, memory: Memory.note(memory, state, event, after) };
  }
}
