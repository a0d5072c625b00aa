"use strict";

/* The view: everything that the page shows of a run at a step, with a block chosen or none. */
const View = (() => {
  let grid, host, arrows, onMoment;
  let shaped = null; // the run, and its length, that the grids and the line of time are made for

  /** What a click on a block, and on a moment, does. */
  function prepare({ choose, goToMoment }) {
    grid = new Grid(Dom.byId("grid"), "block", choose);
    host = new Grid(Dom.byId("host-grid"), "host block", (block) => choose(`h${block}`));
    arrows = new Arrows(grid);
    onMoment = goToMoment;
  }

  function show(run, { step, block }) {
    const { tape, sources } = run, frame = tape.frameAt(step), events = tape.eventsOf(step), { state, memory } = frame;
    if (shaped?.run !== run || shaped.length !== Runs.length()) shape(run);
    const cells = Cells.ofDevice(frame, events), hostCells = state.host ? Cells.ofHost(frame, events) : [];
    const cell = (Moves.isHost(block) ? hostCells : cells)[Moves.numberOf(block)] ?? null;
    const selected = block === null ? null : cell?.bands[0]?.seq ?? null;
    const table = selected ? state.sequences[selected].block_table : [];
    grid.show(cells, memory, block, table);
    arrows.show(table);
    if (state.host) host.show(hostCells, memory, Moves.isHost(block) ? Moves.numberOf(block) : null);
    Queues.show(frame, events, selected);
    Meter.show(Cells.totals(frame));
    Time.show(step, Runs.length());
    Dom.byId("sentence").textContent = sentence(run, step);
    if (block !== null && cell) Panel.show(tape, Math.min(step, tape.length), block, cell, sources);
    else Panel.hint();
  }

  function sentence({ tape }, step) {
    if (step === 0) return "Nobody is here yet, and the pool is empty. Press play, or →.";
    if (step > tape.length) return `All is done since step ${tape.length}.`;
    return Words.ofStep(tape.eventsOf(step), tape.eventsOf(step - 1), tape.frameAt(step - 1), tape.frameAt(step));
  }

  /** What changes with the run, and not with the step. */
  function shape(run) {
    const { tape, moments, idea } = run, { pool, host: hostPool } = tape.snapshot, isSlots = pool.unit === "slots";
    const size = isSlots ? Cells.SLOTS_A_SQUARE : pool.block_size;
    const num_squares = isSlots ? Math.ceil(pool.num_blocks / size) : pool.num_blocks;
    const num_columns = num_squares > 256 ? 32 : num_squares > 64 ? 16 : 8;
    Dom.byId("stage").style.setProperty("--slots", size);
    grid.shape(num_squares, num_columns, isSlots ? "slots, square" : "block");
    Dom.byId("host").hidden = !hostPool;
    if (hostPool) host.shape(hostPool.num_blocks, num_columns, "host block");
    Time.shape(shares(tape), Runs.length(), moments, onMoment);
    Legend.show(tape);
    Dom.byId("idea").textContent = idea;
    shaped = { run, length: Runs.length() };
  }

  /** The share of the pool that is held after each step. */
  function shares(tape) {
    return Array.from({ length: tape.length + 1 }, (_, step) => {
      const { held, all } = Cells.totals(tape.frameAt(step));
      return held / all;
    });
  }

  return { prepare, show, sentence };
})();
