"use strict";

/* The view: everything that the page shows of a run at a step, with a block chosen or none. */
const View = (() => {
  const MOST_SQUARES = 512; // of a grid: more blocks are a field
  let squares, field, host, arrows, onMoment;
  let shaped = null; // the run that the grids are made for
  let timed = null; // and the steps and kinds of events that the line of time and the legend are made for

  /** What a click on a block, and on a moment, does. */
  function prepare({ choose, goToMoment }) {
    squares = new Grid(Dom.byId("grid"), "block", choose);
    field = new Field(Dom.byId("field"), choose);
    host = new Grid(Dom.byId("host-grid"), "host block", (block) => choose(`h${block}`));
    arrows = new Arrows(squares, field);
    onMoment = goToMoment;
  }

  /** What happened `since` a step is told, if the reader has not seen each one: a server is faster than an eye. */
  function show(run, { step, block, since = step - 1, told = since }) {
    const { tape } = run, frame = tape.frameAt(step), events = tape.eventsBetween(since, step), { state, memory } = frame;
    if (shaped !== run) shape(run);
    const grid = isField(tape) ? field : squares, hasHost = isShown(state.host);
    const cells = Cells.ofDevice(frame, events), hostCells = hasHost ? Cells.ofHost(frame, events) : [];
    const cell = (Moves.isHost(block) ? hostCells : cells)[Moves.numberOf(block)] ?? null;
    const selected = block === null ? null : cell?.bands[0]?.seq ?? null;
    const table = selected ? state.sequences[selected].block_table : [];
    grid.show(cells, memory, block, table);
    arrows.show(table, grid);
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

  const isField = ({ snapshot: { pool } }) => pool.unit === "blocks" && pool.num_blocks > MOST_SQUARES;
  const isShown = (host) => host !== null && host.num_blocks <= MOST_SQUARES;

  /** What changes with the run, and not with the step. */
  function shape(run) {
    const { tape, idea } = run, { pool, host: hostPool } = tape.snapshot, isSlots = pool.unit === "slots";
    const size = isSlots ? Cells.SLOTS_A_SQUARE : pool.block_size;
    const num_squares = isSlots ? Math.ceil(pool.num_blocks / size) : pool.num_blocks;
    const num_columns = num_squares > 256 ? 32 : num_squares > 64 ? 16 : 8;
    Dom.byId("stage").style.setProperty("--slots", size);
    Dom.byId("grid").hidden = isField(tape);
    Dom.byId("field").hidden = !isField(tape);
    if (isField(tape)) field.shape(num_squares);
    else squares.shape(num_squares, num_columns, isSlots ? "slots, square" : "block");
    Dom.byId("pool").classList.toggle("dense", num_columns > 16);
    Dom.byId("host").hidden = !isShown(hostPool);
    if (isShown(hostPool)) host.shape(hostPool.num_blocks, num_columns, "host block");
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
