/* The controls: the tabs of the stages, the timeline with its play button, and the quiz. */

import { byId, fill, make, makeSvg } from "./dom.js";

const MILLISECONDS_PER_STEP = 450;
const MAX_POINTS = 800; // of the strip, which is no wider in pixels
const MIN_SHARE = 0.25; // if the run never holds this share of the pool, the strip is stretched

// ---- the stages. They are radio buttons: Tab stops at the selected one, and arrow keys select another.

export function makeTabs(runs, choose) {
  const tabs = runs.map(({ name, title, verdict }, i) => {
    const short = verdict ? "Yours" : name.slice(1); // "3" for stage s3
    const tab = make("div", { role: "radio" }, make("b", {}, short), " ", make("span", {}, title));
    tab.addEventListener("click", () => choose(i));
    return tab;
  });
  fill("stages", ...tabs);
  byId("stages").hidden = runs.length < 2;
  byId("stages").onkeydown = (event) => {
    const move = { " ": 0, ArrowLeft: -1, ArrowUp: -1, ArrowRight: 1, ArrowDown: 1 }[event.key];
    if (move === undefined) return;
    const next = (tabs.indexOf(event.target) + move + tabs.length) % tabs.length;
    choose(next);
    tabs[next].focus();
    event.preventDefault();
    event.stopPropagation(); // the page's own arrow keys move through time
  };
}

export function selectTab(stage) {
  [...byId("stages").children].forEach((tab, i) => {
    tab.setAttribute("aria-checked", i === stage);
    tab.tabIndex = i === stage ? 0 : -1;
  });
}

// ---- the timeline: how much of the pool was held at each step, marks for the moments, and a slider

/** `held` is the share of the pool after each step from `first` on; `length` is the last step of the longest stage. */
export function shapeTimeline(held, first, length, moments, choose) {
  const interval = Math.ceil(held.length / MAX_POINTS), shares = held.map((share, i) => [i, share]);
  const points = shares.filter(([i]) => i % interval === 0 || i === held.length - 1);
  const max = Math.max(...points.map(([, share]) => share)), top = max < MIN_SHARE ? max || 1 : 1;
  const line = points.map(([i, share]) => `${i} ${(1 - share / top).toFixed(3)}`).join("L");
  byId("strip").setAttribute("viewBox", `0 0 ${Math.max(length - first, 1)} 1`);
  byId("strip").replaceChildren(makeSvg("path", { d: `M0 1L${line}L${held.length - 1} 1z` }));
  byId("slider").min = first;
  byId("slider").max = length;
  const marks = moments.map(({ step }) => make("span", { style: `--at:${step / Math.max(length, 1)}` }));
  fill("marks", ...marks);
  const hint = moments.length ? make("span", { class: "hint" }, "What happens next?") : null;
  fill("moments", hint, ...moments.map((moment) => makeMoment(moment, choose)));
}

function makeMoment(moment, choose) {
  const name = `${moment.title}, step ${moment.step}`, step = make("span", {}, String(moment.step));
  const button = make("button", { type: "button", class: "moment", "aria-label": name }, moment.title, step);
  button.addEventListener("click", () => choose(moment));
  return button;
}

export function showStep(step, length) {
  byId("slider").value = step;
  byId("slider").setAttribute("aria-valuetext", `step ${step} of ${length}`);
  byId("step").textContent = `${step} / ${length}`;
}

/** Show the button that returns to the last step of a live run, or hide it if `secondsAgo` is null. */
export function showNow(secondsAgo) {
  byId("now").hidden = secondsAgo === null;
  if (secondsAgo !== null) byId("now").textContent = `${Math.round(secondsAgo)} s ago: go live`;
}

// ---- playing

let timer = null;

/** Play. `next()` advances by one step, and returns false at the end. */
export function play(next) {
  timer = setInterval(() => { if (!next()) stop(); }, MILLISECONDS_PER_STEP);
  showMotion(true);
}

export function stop() {
  clearInterval(timer);
  timer = null;
  showMotion(false);
}

export const isPlaying = () => timer !== null;

/** Show whether the page is playing. A screen reader reads the sentence only while it is paused. */
export function showMotion(isMoving) {
  byId("play").setAttribute("aria-label", isMoving ? "Pause" : "Play");
  byId("sentence").setAttribute("aria-live", isMoving ? "off" : "polite");
}

// ---- the quiz: a question with two answers before a step, and what happened after it

const answers = new Map(); // the reader's answer to each moment

export const isAnswered = (moment) => answers.has(moment);
export const clearQuiz = () => fill("quiz");

/** Ask a question. `onAnswer` is called after the answer, and shows what happens in the next step. */
export function ask(moment, onAnswer) {
  const buttons = moment.answers.map((text, i) => {
    const button = make("button", { type: "button" }, text);
    button.addEventListener("click", () => { answers.set(moment, i); onAnswer(); });
    return button;
  });
  fill("quiz", make("h2", {}, moment.title), make("p", {}, moment.sentence),
    make("p", { class: "question" }, moment.question), make("div", { class: "answers" }, ...buttons));
}

/** Show the right answer and the explanation. */
export function reveal(moment) {
  const isRight = answers.get(moment) === moment.right, answer = `“${moment.answers[moment.right]}”.`;
  const verdict = isRight ? `✓ Right: ${answer}` : `✗ No: ${answer}`;
  fill("quiz", make("h2", {}, moment.title), make("p", { class: "question" }, moment.question),
    make("p", { class: isRight ? "verdict right" : "verdict" }, verdict), make("p", {}, moment.reveal));
}
