"use strict";

/* A tape: the events of a run, step by step, and the state at any step.
 *
 * Every 32 steps it keeps the state, a keyframe: wherever the reader goes, at most 31 steps are played again.
 * A run that is still going on is the same: add() puts an event at the end.
 */
class Tape {
  static KEYFRAME_EVERY = 32;

  constructor(snapshot) {
    this.snapshot = snapshot;
    this.steps = []; // the events of each step that is complete; step 1 is the first
    this._open = []; // the events of the step that is not
    this._keyframes = [Tape.begin(snapshot)];
    this._last = { step: 0, frame: this._keyframes[0] };
  }

  /** Returns true if the event completes a step. */
  add(event) {
    this._open.push(event);
    if (event.kind !== "step") return false;
    this.steps.push(this._open);
    this._open = [];
    if (this.length % Tape.KEYFRAME_EVERY === 0) this._keyframes.push(this.frameAt(this.length));
    return true;
  }

  get length() {
    return this.steps.length;
  }

  /** The state after a step, and what is remembered of the past: {state, memory}. Step 0 is before the first event. */
  frameAt(step) {
    step = Math.max(0, Math.min(step, this.length));
    const key = Math.min(Math.floor(step / Tape.KEYFRAME_EVERY), this._keyframes.length - 1);
    const isAhead = this._last.step <= step && this._last.step >= key * Tape.KEYFRAME_EVERY;
    let { step: at, frame } = isAhead ? this._last : { step: key * Tape.KEYFRAME_EVERY, frame: this._keyframes[key] };
    for (; at < step; at += 1) frame = this.steps[at].reduce(Tape.advance, frame);
    this._last = { step, frame };
    return frame;
  }

  /** Whether an event of this kind is on it. */
  has(kind) {
    return this.steps.some((events) => events.some((event) => event.kind === kind));
  }

  eventsOf(step) {
    return this.steps[step - 1] ?? [];
  }

  static begin(snapshot) {
    const state = Reducer.apply(null, snapshot);
    return { state, memory: Memory.begin(state) };
  }

  static advance({ state, memory }, event) {
    return { state: Reducer.apply(state, event), memory: Memory.note(memory, state, event) };
  }
}
