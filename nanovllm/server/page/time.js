"use strict";

/* The line of time: what was held at each step, marks for the moments, a slider, and a button that plays. */
const Time = (() => {
  const MILLISECONDS_A_STEP = 450;
  const MOST_POINTS = 800; // of the strip: more than its pixels are not seen
  const LITTLE = 0.25; // of the pool: if never more is held, the strip is stretched
  let timer = null;

  /** `held` has the share of the pool that was held after each step from `first` on; `length` is the last step of the
   * longest stage.
   */
  function shape(held, first, length, moments, choose) {
    const every = Math.ceil(held.length / MOST_POINTS), shown = held.map((share, i) => [i, share]);
    const points = shown.filter(([i]) => i % every === 0 || i === held.length - 1);
    const most = Math.max(...points.map(([, share]) => share)), top = most < LITTLE ? most || 1 : 1;
    const line = points.map(([i, share]) => `${i} ${(1 - share / top).toFixed(3)}`).join("L");
    Dom.byId("strip").setAttribute("viewBox", `0 0 ${Math.max(length - first, 1)} 1`);
    Dom.byId("strip").replaceChildren(Dom.svg("path", { d: `M0 1L${line}L${held.length - 1} 1z` }));
    Dom.byId("slider").min = first;
    Dom.byId("slider").max = length;
    const marks = moments.map(({ step }) => Dom.make("span", { style: `--at:${step / Math.max(length, 1)}` }));
    Dom.fill("marks", ...marks);
    const label = moments.length ? Dom.make("span", { class: "hint" }, "What happens next?") : null;
    Dom.fill("moments", label, ...moments.map((moment) => chip(moment, choose)));
  }

  function chip(moment, choose) {
    const name = `${moment.title}, step ${moment.step}`, step = Dom.make("span", {}, String(moment.step));
    const button = Dom.make("button", { type: "button", class: "moment", "aria-label": name }, moment.title, step);
    button.addEventListener("click", () => choose(moment));
    return button;
  }

  function show(step, length) {
    Dom.byId("slider").value = step;
    Dom.byId("slider").setAttribute("aria-valuetext", `step ${step} of ${length}`);
    Dom.byId("step").textContent = `${step} / ${length}`;
  }

  /** The way back to the last step of a live run; `seconds` ago is what is shown. */
  function showNow(isOffered, seconds) {
    Dom.byId("now").hidden = !isOffered;
    if (isOffered) Dom.byId("now").textContent = `${Math.round(seconds)} s ago: go live`;
  }

  /** `next()` goes one step on, and says whether there is another. */
  function play(next) {
    timer = setInterval(() => { if (!next()) stop(); }, MILLISECONDS_A_STEP);
    told();
  }

  function stop() {
    clearInterval(timer);
    timer = null;
    told();
  }

  const isPlaying = () => timer !== null;

  /** A sentence is read aloud only where the reader stops. */
  function told() {
    const isMoving = isPlaying() || Follow.isFollowing();
    Dom.byId("play").setAttribute("aria-label", isMoving ? "Pause" : "Play");
    Dom.byId("sentence").setAttribute("aria-live", isMoving ? "off" : "polite");
  }

  return { shape, show, showNow, play, stop, isPlaying, told };
})();
