"use strict";

/* A prediction: a question with two answers before a step, and what happened after it. */
const Quiz = (() => {
  const answers = new Map(); // moment -> the answer that was chosen

  /** `go()` is called when the reader has answered: the step that tells is the next one. */
  function ask(moment, go) {
    const buttons = moment.answers.map((text, i) => {
      const button = Dom.make("button", { type: "button" }, text);
      button.addEventListener("click", () => { answers.set(moment, i); go(); });
      return button;
    });
    Dom.byId("quiz").replaceChildren(
      Dom.make("h2", {}, moment.title), Dom.make("p", {}, moment.sentence), Dom.make("p", { class: "question" }, moment.question),
      Dom.make("div", { class: "answers" }, ...buttons));
  }

  function reveal(moment) {
    const isRight = answers.get(moment) === moment.right;
    Dom.byId("quiz").replaceChildren(
      Dom.make("h2", {}, moment.title), Dom.make("p", { class: "question" }, moment.question),
      Dom.make("p", { class: isRight ? "verdict right" : "verdict" }, isRight ? "✓ Right: " : "✗ No: ", `“${moment.answers[moment.right]}”.`),
      Dom.make("p", {}, moment.reveal));
  }

  const isAnswered = (moment) => answers.has(moment);
  const clear = () => Dom.byId("quiz").replaceChildren();

  return { ask, reveal, isAnswered, clear };
})();
