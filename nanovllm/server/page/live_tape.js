"use strict";

/* The tape of a run that is still going on: it keeps the last minutes, and no more than a page should hold. */
class LiveTape extends Tape {
  static MOST_SECONDS = 300;
  static MOST_WEIGHT = 300_000; // an event weighs 1, and is about 150 bytes

  constructor(snapshot) {
    super(snapshot);
    this.weight = 0;
    this._stamps = [LiveTape.now()]; // when each step came, in seconds
    this._weights = [];
  }

  static now = () => performance.now() / 1000;

  close() {
    this._weights.push(this._weigh(this._open));
    this.weight += this._weights.at(-1);
    this._stamps.push(LiveTape.now());
    super.close();
    while (this._isLong()) this.forget();
  }

  /** What happened between two steps is shown without waiting for the next one, which may never come. */
  settle() {
    if (this._open.length) this.close();
  }

  forget() {
    const forgotten = this._weights.splice(0, Tape.KEYFRAME_EVERY);
    this.weight -= forgotten.reduce((sum, weight) => sum + weight, 0);
    this._stamps.splice(0, Tape.KEYFRAME_EVERY);
    super.forget();
  }

  /** Whether it is the same pool: the connection was lost, and it goes on. */
  goesOnWith({ pool, host }) {
    const shape = (each) => JSON.stringify([each.pool, each.host]);
    return shape(this.snapshot) === shape({ pool, host });
  }

  secondsAgo(step) {
    return LiveTape.now() - this._stamps[step - this.first];
  }

  _isLong() {
    if (this.steps.length < 2 * Tape.KEYFRAME_EVERY) return false;
    const age = this.secondsAgo(this.first + Tape.KEYFRAME_EVERY);
    return this.weight > LiveTape.MOST_WEIGHT || age > LiveTape.MOST_SECONDS;
  }

  /** Its events, and its share of the next keyframe. */
  _weigh(events) {
    const tokens = events.reduce((sum, event) => sum + (event.tokens?.length ?? 0), 0);
    const num_blocks = this.snapshot.pool.num_blocks + (this.snapshot.host?.num_blocks ?? 0);
    return events.length + tokens / 8 + num_blocks / (4 * Tape.KEYFRAME_EVERY);
  }
}
