"use strict";

/* The view: everything that the page shows of a run at a step, with a block chosen or none. */
const View = (() => {
  let device, host, arrows, onMoment;
  let shaped = null; // the run that the grids are made for
  let timed = null; // and the steps and kinds of events that the line of time and the legend are made for

  /** What a click on a block, and on a moment, does. */
  function prepare({ choose, goToMoment }) {
    device = new Tier(Dom.byId("grid"), Dom.byId("field"), "block", choose);
    host = new Tier(Dom.byId("host-grid"), Dom.byId("host-field"), "host block", (block) => choose(`h${block}`));
    arrows = new Arrows(...device.parts);
    onMoment = goToMoment;
  }

  /** What happened `since` a step is told, if the reader has not seen each one: a server is faster than an eye. */
  function show(run, { step, block, since = step - 1, told = since }) {
    const { tape } = run, frame = tape.frameAt(step), { state, memory } = frame;
    const events = tape.eventsBetween(since, step);
    if (shaped !== run) shape(run);
    const hasHost = isThere(state.host);
    const cells = Cells.ofDevice(frame, events), hostCells = hasHost ? Cells.ofHost(frame, events) : [];
    const cell = (Moves.isHost(block) ? hostCells : cells)[Moves.numberOf(block)] ?? null;
    const selected = block === null ? null : cell?.bands[0]?.seq ?? null;
    const table = selected ? state.sequences[selected].block_table : [];
    device.show(cells, memory, block, table);
    arrows.show(table, device.grid);
    if (hasHost) host.show(hostCells, memory, Moves.isHost(block) ? Moves.numberOf(block) : null);
    Queues.show(frame, events, selected);
    Meter.show(Cells.totals(frame, cells));
    showTime(run, step);
    if (told !== null) Dom.byId("sentence").textContent = sentence(run, step, told);
    if (block !== null && cell) Panel.show(run, step, block, cell);
    else Panel.hint();
  }

  function sentence({ tape }, step, since = step - 1) {
    if (step === 0) return "Nobody is here yet, and the pool is empty. Press play, or →.";
    if (step > tape.length) return `All is done since step ${tape.length}.`;
    const events = tape.eventsBetween(since, step);
    return Words.ofStep(events, tape.eventsOf(since), tape.frameAt(since), tape.frameAt(step));
  }

  const isThere = (host) => host !== null && host.num_blocks > 0;

  /** What changes with the run, and not with the step. */
  function shape(run) {
    const { tape, idea } = run, { pool, host: hostPool } = tape.snapshot, isSlots = pool.unit === "slots";
    const size = isSlots ? Cells.SLOTS_A_SQUARE : pool.block_size;
    const num_squares = isSlots ? Math.ceil(pool.num_blocks / size) : pool.num_blocks;
    Dom.byId("stage").style.setProperty("--slots", size);
    const most = Math.max(num_squares, hostPool?.num_blocks ?? 0);
    device.shape(num_squares, isSlots ? "slots, square" : "block", most);
    Dom.byId("host").hidden = !isThere(hostPool);
    if (isThere(hostPool)) host.shape(hostPool.num_blocks, "host block", most);
    Dom.byId("idea").textContent = idea;
    shaped = run;
    timed = null;
  }

  /** The line of time grows with the run, and the legend when something is seen for the first time. */
  function showTime(run, step) {
    const { tape, moments } = run, first = tape.first, length = Runs.length();
    if (timed?.length !== length || timed.first !== first) Time.shape(tape.held(), first, length, moments, onMoment);
    if (timed?.kinds !== tape.kinds.size) Legend.show(tape);
    timed = { length, first, kinds: tape.kinds.size };
    Time.show(step, length);
    Time.showNow(run.isLive && !Follow.isFollowing(), run.isLive ? tape.secondsAgo(step) : 0);
  }

  return { prepare, show, sentence };
})();
