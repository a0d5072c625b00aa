"use strict";

/* The page: which stage, which step and which block it shows, and the five things that a reader can do. feed(event) is
 * the one way in, for a recorded run as for one that is still going on.
 */
const View = (() => {
  const stages = []; // {name, title, idea, tape, moments, sources}
  const at = { stage: 0, step: 0, block: null }; // what the fragment of the address says: #s5/31/b17
  let shaped = null; // the stage that the grids and the line of time are made for
  let grid, host, arrows;

  // ---- data

  let isLive = false; // from now on events come while somebody looks

  /** A snapshot begins a run, an event goes on with it. `about` is what the page of recorded runs says of one. */
  function feed(event, about = {}) {
    if (event.kind === "snapshot") {
      stages.push({ name: event.stage, title: event.stage, idea: "", moments: [], sources: {}, ...about, tape: new Tape(event) });
      if (isLive) open();
      return;
    }
    const { tape } = stages.at(-1), wasAtEnd = stage().tape === tape && at.step === tape.length;
    if (!tape.add(event) || !isLive) return;
    shaped = null; // the line of time has grown
    if (wasAtEnd) at.step = tape.length;
    show();
  }

  const stage = () => stages[at.stage];
  const length = () => Math.max(...stages.map(({ tape }) => tape.length));

  // ---- what is shown

  function show() {
    const { tape, sources } = stage(), { pool, host: hostPool } = tape.snapshot;
    if (shaped !== stage()) shape();
    const frame = tape.frameAt(at.step), events = tape.eventsOf(at.step), cells = Cells.ofDevice(frame, events, pool);
    const hostCells = hostPool ? Cells.ofHost(frame, hostPool) : [];
    const isHost = String(at.block).startsWith("h");
    const cell = at.block === null ? null : isHost ? hostCells[at.block.slice(1)] : cells[at.block];
    const selected = cell?.bands[0]?.seq ?? null;
    const table = selected ? frame.state.sequences[selected].block_table : [];
    grid.show(cells, frame.memory, at.block, new Map(table.map((block, i) => [block, i])));
    arrows.show(table);
    if (hostPool) host.show(hostCells, frame.memory, isHost ? Number(at.block.slice(1)) : null);
    Queues.show(frame, events, selected);
    Meter.show(Cells.totals(frame, pool));
    Time.show(at.step, length(), at.step > tape.length);
    Dom.byId("sentence").textContent = sentence(at.step);
    if (cell) Panel.show(tape, Math.min(at.step, tape.length), at.block, cell, sources, pool);
    else Panel.hint();
    history.replaceState(null, "", fragment());
  }

  function sentence(step, { tape } = stage()) {
    if (step === 0) return "Nobody is here yet, and the pool is empty. Press play, or →.";
    if (step > tape.length) return `All is done since step ${tape.length}.`;
    const before = tape.frameAt(step - 1);
    return Words.ofStep(tape.eventsOf(step), tape.eventsOf(step - 1), before, tape.frameAt(step));
  }

  /** What changes with the stage, and not with the step. */
  function shape() {
    const { tape, moments, idea } = stage(), { pool, host: hostPool } = tape.snapshot;
    const size = pool.unit === "slots" ? Cells.SLOTS_A_CELL : pool.block_size, num_squares = pool.unit === "slots" ? Math.ceil(pool.num_blocks / size) : pool.num_blocks;
    const num_columns = num_squares > 256 ? 32 : num_squares > 64 ? 16 : 8;
    Dom.byId("stage").style.setProperty("--slots", size);
    grid.noun = pool.unit === "slots" ? "slots of square" : "block";
    grid.shape(num_squares, num_columns);
    Dom.byId("host").hidden = !hostPool;
    if (hostPool) host.shape(hostPool.num_blocks, num_columns);
    const held = Array.from({ length: tape.length + 1 }, (_, step) => { const totals = Cells.totals(tape.frameAt(step), pool); return totals.held / totals.all; });
    Time.shape(held, length(), moments, goToMoment);
    Legend.show(pool, { canShare: tape.has("shared") || tape.has("hit"), canCache: tape.has("cached"), hasHost: hostPool !== null });
    Dom.byId("idea").textContent = idea;
    Dom.byId("stages").querySelectorAll("[role=radio]").forEach((radio, i) => {
      radio.setAttribute("aria-checked", i === at.stage);
      radio.tabIndex = i === at.stage ? 0 : -1;
    });
    shaped = stage();
  }

  // ---- what a reader can do

  function goTo(step) {
    Time.stop();
    move(step);
    offer();
  }

  function move(step) {
    at.step = Math.max(0, Math.min(step, length()));
    Quiz.clear();
    show();
  }

  /** A question is asked where its moment is next; whoever has answered it sees the answer again after it. */
  function offer() {
    const next = stage().moments.find(({ step }) => step === at.step + 1), now = stage().moments.find(({ step }) => step === at.step);
    if (now && Quiz.isAnswered(now)) Quiz.reveal(now);
    else if (next && !Quiz.isAnswered(next)) Quiz.ask(next, () => goTo(next.step));
  }

  function goToMoment(moment) {
    at.block = moment.block ?? null;
    goTo(Quiz.isAnswered(moment) ? moment.step : moment.step - 1);
  }

  function playOrPause() {
    if (Time.isPlaying()) return goTo(at.step);
    if (at.step >= length()) move(0);
    Time.play(() => { move(at.step + 1); return at.step < length(); });
  }

  function choose(block) {
    at.block = at.block === block ? null : block;
    show();
  }

  function switchTo(number) {
    at.stage = number;
    at.block = null;
    goTo(at.step);
  }

  // ---- the address

  const fragment = () => `#s${at.stage + 1}/${at.step}${at.block === null ? "" : `/b${at.block}`}`;

  function restore() {
    const found = /^#s(\d+)\/(\d+)(?:\/b(h?\d+))?$/.exec(location.hash);
    if (!found) return;
    const [, number, step, block] = found;
    at.stage = Math.min(Math.max(Number(number), 1), stages.length) - 1;
    at.step = Math.min(Number(step), length());
    at.block = block === undefined ? null : block.startsWith("h") ? block : Number(block);
  }

  // ---- the beginning

  function tabs() {
    const radios = stages.map(({ title }, i) => {
      const radio = Dom.make("div", { role: "radio" }, Dom.make("b", {}, String(i + 1)), Dom.make("span", {}, title));
      radio.addEventListener("click", () => switchTo(i));
      return radio;
    });
    Dom.byId("stages").replaceChildren(...radios);
    Dom.byId("stages").hidden = stages.length < 2;
  }

  function stageKeys(event) {
    const move = { ArrowLeft: -1, ArrowUp: -1, ArrowRight: 1, ArrowDown: 1 }[event.key];
    if (!move) return;
    switchTo((at.stage + move + stages.length) % stages.length);
    Dom.byId("stages").children[at.stage].focus();
    event.preventDefault();
    event.stopPropagation();
  }

  function keys(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const isSlider = event.target.id === "slider", isButton = event.target.closest("button, summary, pre");
    if (event.key === "ArrowLeft" || event.key === "ArrowRight") {
      if (event.target.closest("pre")) return;
      goTo(at.step + (event.key === "ArrowLeft" ? -1 : 1));
    } else if (event.key === " " && (isSlider || !isButton)) playOrPause();
    else if (event.key === "Escape" && at.block !== null) choose(at.block);
    else return;
    event.preventDefault();
  }

  /** There is something to see. */
  function open() {
    Dom.byId("no-data").hidden = true;
    Dom.byId("stage").hidden = false;
    tabs();
    restore();
    show();
    offer();
  }

  function start() {
    grid = new Grid(Dom.byId("grid"), "block", choose);
    host = new Grid(Dom.byId("host-grid"), "host block", (block) => choose(`h${block}`));
    arrows = new Arrows(grid);
    listen();
    const packed = Dom.byId("data").textContent.trim();
    if (packed) {
      const data = JSON.parse(packed);
      Dom.byId("lead").textContent = data.lead;
      for (const run of data.runs) for (const event of unpack(data, run)) feed(event, run);
      open();
    }
    isLive = true;
  }

  function listen() {
    Dom.byId("play").addEventListener("click", playOrPause);
    Dom.byId("slider").addEventListener("input", ({ target }) => { Time.stop(); move(Number(target.value)); });
    Dom.byId("slider").addEventListener("change", offer); // where the reader lets go of it
    Dom.byId("stages").addEventListener("keydown", stageKeys);
    addEventListener("keydown", keys);
    addEventListener("hashchange", () => { restore(); show(); offer(); });
    const narrow = matchMedia("(max-width: 720px)");
    const fold = () => document.querySelectorAll("#queues details").forEach((each) => { each.open = !narrow.matches; });
    narrow.addEventListener("change", fold);
    fold();
    Time.told();
  }

  return { feed, start, stages, sentence, at };
})();

View.start();
