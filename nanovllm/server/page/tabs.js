"use strict";

/* The stages, in a row: one of them is chosen. As radio buttons are, they are one stop of Tab, and arrows choose. */
const Tabs = (() => {
  function make(runs, choose) {
    const tabs = runs.map(({ title }, i) => {
      const tab = Dom.make("div", { role: "radio" }, Dom.make("b", {}, String(i + 1)), " ", Dom.make("span", {}, title));
      tab.addEventListener("click", () => choose(i));
      return tab;
    });
    Dom.fill("stages", ...tabs);
    Dom.byId("stages").hidden = runs.length < 2;
    Dom.byId("stages").onkeydown = (event) => key(event, tabs, choose);
  }

  function key(event, tabs, choose) {
    const move = { " ": 0, ArrowLeft: -1, ArrowUp: -1, ArrowRight: 1, ArrowDown: 1 }[event.key];
    if (move === undefined) return;
    const next = (tabs.indexOf(event.target) + move + tabs.length) % tabs.length;
    choose(next);
    tabs[next].focus();
    event.preventDefault();
    event.stopPropagation(); // or an arrow would also move through time
  }

  function show(stage) {
    [...Dom.byId("stages").children].forEach((tab, i) => {
      tab.setAttribute("aria-checked", i === stage);
      tab.tabIndex = i === stage ? 0 : -1;
    });
  }

  return { make, show };
})();
