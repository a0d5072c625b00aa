"use strict";

/* The line of time: a strip with what was held at each step, marks for the moments, a slider, a button to play. */
const Time = (() => {
  const MILLISECONDS_A_STEP = 450;
  let timer = null;

  /** `held` has the share of the pool that was held after each step; `length` is as long as the longest stage. */
  function shape(held, length, moments, choose) {
    const strip = Dom.byId("strip"), slider = Dom.byId("slider");
    slider.max = length;
    strip.setAttribute("viewBox", `0 0 ${Math.max(length, 1)} 1`);
    const line = held.map((share, step) => `${step} ${(1 - share).toFixed(3)}`).join("L");
    strip.replaceChildren(Dom.svg("path", { class: "held", d: `M0 1L${line}L${held.length - 1} 1z` }));
    const marks = moments.map(({ step }) => Dom.make("span", { class: "mark", style: `--at:${step / Math.max(length, 1)}` }));
    for (const old of document.querySelectorAll(".mark")) old.remove();
    Dom.byId("track").append(...marks);
    const buttons = moments.map((moment) => {
      const button = Dom.make("button", { type: "button", class: "moment" }, moment.title, Dom.make("span", {}, String(moment.step)));
      button.addEventListener("click", () => choose(moment));
      return button;
    });
    Dom.byId("moments").replaceChildren(...buttons);
  }

  function show(step, length, ended) {
    Dom.byId("slider").value = step;
    Dom.byId("slider").setAttribute("aria-valuetext", `step ${step} of ${length}`);
    Dom.byId("step").textContent = `${step} / ${length}`;
    Dom.byId("track").style.setProperty("--at", step / Math.max(length, 1));
    document.body.classList.toggle("ended", ended);
  }

  /** `next()` goes one step on and says whether there is another. */
  function play(next) {
    stop();
    timer = setInterval(() => { if (!next()) stop(); }, MILLISECONDS_A_STEP);
    told();
  }

  function stop() {
    clearInterval(timer);
    timer = null;
    told();
  }

  const isPlaying = () => timer !== null;

  /** Told aloud is only where the reader stops: a sentence twice a second is nobody's. */
  function told() {
    const button = Dom.byId("play");
    button.setAttribute("aria-label", isPlaying() ? "Pause" : "Play");
    button.dataset.playing = isPlaying();
    Dom.byId("sentence").setAttribute("aria-live", isPlaying() ? "off" : "polite");
  }

  return { shape, show, play, stop, isPlaying, told };
})();
