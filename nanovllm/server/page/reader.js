/* The reader of the page: their position, everything they can do, and the drawing of the step they look at.
 *
 * The reader moves through time, plays, switches stages, selects a block and answers predictions. In a live run they
 * follow the last step until they look back.
 */

import { SLOTS_PER_SQUARE, deviceCells, hostCells, totals } from "./cells.js";
import {
  ask, clearQuiz, isAnswered, isPlaying, makeTabs, play, reveal, selectTab, shapeTimeline, showMotion, showNow,
  showStep, stop,
} from "./controls.js";
import { byId } from "./dom.js";
import { blockNumber, isHostBlock, showHint, showPanel } from "./panel.js";
import { Arrows, Tier, showLegend, showMeter } from "./pool.js";
import { showQueues } from "./queues.js";
import { addEvent, lastStep, runs } from "./tape.js";
import { stepSentence } from "./words.js";
import { marksAt, showVerdict } from "./yours.js";

/** The reader's position. `owner` is the sequence whose block the page selected; null after the reader's click. */
export const at = { stage: 0, step: 0, block: null, owner: null };

const currentRun = () => runs[at.stage];

// ---- drawing

let device, host, arrows;
let drawnRun = null; // the run for which the tiers were last shaped
let drawnTime = null; // {first, length, num_kinds} for which the timeline and the legend were last shaped

function prepare() {
  device = new Tier(byId("grid"), byId("field"), "block", choose);
  host = new Tier(byId("host-grid"), byId("host-field"), "host block", (block) => choose(`h${block}`));
  arrows = new Arrows(device);
  addEventListener("hashchange", restore);
  addEventListener("pagehide", flushAddress);
}

/** Draw the reader's step. */
function show() {
  at.step = Math.max(at.step, currentRun().tape.first); // a live run forgets its oldest steps
  draw(currentRun(), at);
  selectTab(at.stage);
  if (!currentRun().isLive) writeAddress();
}

/** Draw a run at a step. A server is faster than the eye, so its page shows all steps after `since` together. The
 * sentence covers those after `sentenceFrom`; for null, it doesn't change.
 */
function draw(run, { step, block, since = step - 1, sentenceFrom = since }) {
  const { tape } = run, frame = tape.frameAt(step), { state } = frame, events = tape.eventsBetween(since, step);
  if (drawnRun !== run) shapeRun(run);
  const moment = run.moments.find((each) => each.step === step && isAnswered(each)), marked = marksAt(run.verdict, step);
  const device_cells = deviceCells(frame, events, moment?.blocks ?? marked.blocks);
  const host_cells = hasHost(state.host) ? hostCells(frame, events) : [];
  const cell = (isHostBlock(block) ? host_cells : device_cells)[blockNumber(block)] ?? null;
  const selected = block === null ? null : cell?.bands[0]?.seq ?? null;
  const table = selected ? state.sequences[selected].block_table : [];
  device.show(device_cells, frame.memory, block, table);
  arrows.show(table);
  if (hasHost(state.host)) host.show(host_cells, frame.memory, isHostBlock(block) ? blockNumber(block) : null);
  showQueues(frame, events, selected, marked.seqs);
  showMeter(totals(frame, device_cells));
  showVerdict(run.verdict, step);
  drawTime(run, step);
  if (sentenceFrom !== null) byId("sentence").textContent = sentenceAt(run, step, sentenceFrom);
  if (block !== null && cell) showPanel(run, step, block, cell, moment?.block === block ? moment.code : null);
  else showHint();
}

/** Return the sentence for the steps after `since`, up to `step`. */
export function sentenceAt({ tape, verdict }, step, since = step - 1) {
  if (step === 0) return "The pool is empty. Press play, or →.";
  if (step > tape.length && verdict && !verdict.is_same) return `Your run is shown up to step ${tape.length}.`;
  if (step > tape.length) return `All requests were done after step ${tape.length}.`;
  return stepSentence(tape.eventsBetween(since, step), tape.eventsOf(since), tape.frameAt(step));
}

const hasHost = (host) => host !== null && host.num_blocks > 0;

/** Shape everything that depends on the run, but not on the step. */
function shapeRun(run) {
  const { pool, host: hostPool } = run.tape.snapshot, isSlots = pool.unit === "slots";
  const size = isSlots ? SLOTS_PER_SQUARE : pool.block_size;
  const num_squares = isSlots ? Math.ceil(pool.num_blocks / size) : pool.num_blocks;
  const max_squares = Math.max(num_squares, hostPool?.num_blocks ?? 0);
  byId("stage").style.setProperty("--slots", size);
  device.shape(num_squares, isSlots ? "slots, square" : "block", max_squares);
  byId("host").hidden = !hasHost(hostPool);
  if (hasHost(hostPool)) host.shape(hostPool.num_blocks, "host block", max_squares);
  byId("idea").textContent = run.idea;
  drawnRun = run;
  drawnTime = null;
}

/** Draw the timeline, which grows with a live run, and the legend, which grows with the kinds of events. */
function drawTime(run, step) {
  const { tape, moments, isLive } = run, { first } = tape, length = lastStep(), num_kinds = tape.kinds.size;
  if (drawnTime?.length !== length || drawnTime.first !== first) {
    shapeTimeline(tape.held(), first, length, moments, goToMoment);
  }
  if (drawnTime?.num_kinds !== num_kinds) showLegend(tape);
  drawnTime = { length, first, num_kinds };
  showStep(step, length);
  showNow(isLive && !isFollowing() ? tape.secondsAgo(step) : null);
}

// ---- what the reader can do

/** Move to a step without asking a question, for playing and scrubbing. */
function move(step) {
  if (currentRun().isLive) stopFollowing();
  at.step = Math.max(0, Math.min(step, lastStep()));
  clearQuiz();
  show();
}

/** Move to a step, and ask the question that comes next. */
export function goTo(step) {
  stop();
  move(step);
  offerQuestion();
}

/** Ask the question about the next step, or show the answer again if this step's question has been answered. */
export function offerQuestion() {
  const momentAt = (step) => currentRun().moments.find((moment) => moment.step === step);
  const now = momentAt(at.step), next = momentAt(at.step + 1);
  if (now && isAnswered(now)) reveal(now);
  else if (next && !isAnswered(next)) ask(next, () => goToMoment(next));
}

/** Go to a moment's question, or to its answer. Select its block only with the answer, which it may give away. */
function goToMoment(moment) {
  at.block = isAnswered(moment) ? moment.block : null;
  goTo(isAnswered(moment) ? moment.step : moment.step - 1);
  if (!isAnswered(moment)) ask(moment, () => goToMoment(moment)); // instead of the previous moment's answer
}

/** Move to the slider's step. At the end of a live run, follow the run again. */
export function scrub(step) {
  stop();
  if (currentRun().isLive && step >= lastStep()) follow();
  else move(step);
}

export function playOrPause() {
  if (isPlaying() || isFollowing()) return goTo(at.step);
  if (at.step >= lastStep() && currentRun().isLive) return follow();
  if (at.step >= lastStep()) move(0);
  clearQuiz();
  play(() => {
    move(at.step + 1);
    return at.step < lastStep();
  });
}

function switchTo(stage) {
  Object.assign(at, { stage, block: null });
  goTo(at.step);
}

/** Select a block, or deselect it if it is selected. */
export function choose(block) {
  Object.assign(at, { block: at.block === block ? null : block, owner: null });
  show();
}

/** Select a sequence's block, unless the reader has selected one. */
export function chooseFor(owner, block) {
  if (at.block === null || at.owner !== null) Object.assign(at, { block, owner });
}

/** Deselect a block that the page selected, once its sequence has lost it to another one. */
function deselectLost({ running, sequences }) {
  const has = (seq) => sequences[seq]?.block_table.includes(at.block);
  if (at.owner === null || has(at.owner) || !running.some(has)) return;
  Object.assign(at, { block: null, owner: null });
}

/** Show the page for the first time: the tabs, and the step in the address or the live run. */
export function open() {
  if (!device) prepare();
  byId("no-data").hidden = true;
  byId("stage").hidden = false;
  makeTabs(runs, switchTo);
  restore();
}

// ---- the address: #s5/31/b17 is stage 5, step 31, block 17; bh3 is block 3 of the host. #yours is a learner's run

const ADDRESS_DELAY = 200; // milliseconds; a browser may refuse many changes in a short time
let addressTimer = null;

function writeAddress() {
  addressTimer ??= setTimeout(flushAddress, ADDRESS_DELAY);
}

export function flushAddress() {
  if (addressTimer === null) return;
  clearTimeout(addressTimer);
  addressTimer = null;
  const fragment = `#${currentRun().name}/${at.step}${at.block === null ? "" : `/b${at.block}`}`;
  if (fragment !== location.hash) history.replaceState(null, "", fragment);
}

/** Go to the place in the address, or to the nearest one that exists. */
function restore() {
  if (currentRun().isLive) return followNewRun();
  clearTimeout(addressTimer);
  addressTimer = null;
  const match = /^#(\w+)\/(\d+)(?:\/b(h?\d+))?$/.exec(location.hash);
  if (match) {
    const [, name, step, block] = match, stage = runs.findIndex((run) => run.name === name);
    at.stage = stage < 0 ? runs.length - 1 : stage;
    at.step = Math.min(Number(step), lastStep());
    at.block = block === undefined || block.startsWith("h") ? block ?? null : Number(block);
  } else if (runs.some(({ verdict }) => verdict)) {
    at.stage = runs.findIndex(({ verdict }) => verdict);
    at.step = currentRun().verdict.step;
  }
  goTo(at.step);
}

// ---- following a live run. A server may run 200 steps per second, so the page is drawn at most once per message, and
// each sentence stays for a moment.

const SENTENCE_MILLISECONDS = 1600, REST_MILLISECONDS = 4000;
const REST = "No requests are running. Send a prompt and watch its blocks.";
let isOn = true, isDue = false, drawCost = 0, restTimer = null; // drawCost in milliseconds
let drawn = 0, read = 0, readTime = 0; // the last step that was drawn, the last one that a sentence covered, and when

const isFollowing = () => isOn && runs.at(-1)?.isLive === true;
const updateMotion = () => showMotion(isPlaying() || isFollowing());

/** Add an event of a live run. The first one is a snapshot. A reader who has looked back stays at their step. */
export function feed(event) {
  const before = runs.at(-1);
  if (!addEvent(event)) return;
  if (runs.at(-1) !== before) open();
  drawSoon();
}

/** Show what has happened since the last step, because no more events come for now. */
export function settle() {
  runs.at(-1).tape.settle();
  drawSoon();
}

/** Schedule one drawing. Drawing takes up at most a quarter of the time. */
function drawSoon() {
  if (isDue) return;
  isDue = true;
  setTimeout(() => requestAnimationFrame(drawNow), 3 * drawCost);
}

function drawNow() {
  const began = performance.now();
  isDue = false;
  if (isOn) drawLast(began);
  else show(); // the timeline has grown
  drawCost = performance.now() - began;
}

function drawLast(time) {
  const { tape } = currentRun(), isNewSentence = time - readTime >= SENTENCE_MILLISECONDS && read < tape.length;
  const since = Math.min(drawn, tape.length), sentenceFrom = isNewSentence ? read : null;
  Object.assign(at, { step: tape.length, since, sentenceFrom });
  deselectLost(tape.frameAt(tape.length).state);
  show();
  drawn = tape.length;
  if (isNewSentence) [read, readTime] = [tape.length, time];
  clearTimeout(restTimer);
  restTimer = setTimeout(() => rest(tape), SENTENCE_MILLISECONDS);
}

/** After a quiet moment, show the sentence for the remaining steps, and then that no request is running. */
function rest(tape) {
  if (!isOn) return;
  if (read < tape.length) {
    drawSoon();
    return;
  }
  const { running, waiting } = tape.frameAt(tape.length).state;
  if (running.length + waiting.length > 0) return;
  restTimer = setTimeout(showRest, REST_MILLISECONDS - SENTENCE_MILLISECONDS);
}

function showRest() {
  if (isOn) byId("sentence").textContent = REST;
}

/** Go to the last step and follow. */
export function follow() {
  isOn = true;
  read = drawn = lastStep();
  stop();
  drawNow();
  updateMotion();
}

function stopFollowing() {
  isOn = false;
  Object.assign(at, { since: undefined, sentenceFrom: undefined });
  updateMotion();
}

function followNewRun() {
  [isOn, drawn, read, readTime] = [true, 0, 0, 0];
  Object.assign(at, { step: 0, block: null, owner: null });
  showRest();
  updateMotion();
}

/** Return the frame that the reader sees, or null if they don't follow a live run. */
export const liveFrame = () => (isFollowing() ? runs[0].tape.frameAt(at.step) : null);
