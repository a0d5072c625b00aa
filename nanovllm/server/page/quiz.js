"use strict";

/* A prediction: a question with two answers before a step, and what happened after it. */
const Quiz = (() => {
  const chosen = new Map(); // by moment: the answer that the reader gave

  /** `go()` is called when the reader has answered: the next step shows what happens. */
  function ask(moment, go) {
    const buttons = moment.answers.map((text, i) => {
      const button = Dom.make("button", { type: "button" }, text);
      button.addEventListener("click", () => { chosen.set(moment, i); go(); });
      return button;
    });
    const answers = Dom.make("div", { class: "answers" }, ...buttons);
    show(moment, Dom.make("p", {}, moment.sentence), question(moment), answers);
  }

  function reveal(moment) {
    const isRight = chosen.get(moment) === moment.right, answer = `“${moment.answers[moment.right]}”.`;
    const verdict = isRight ? `✓ Right: ${answer}` : `✗ No: ${answer}`;
    const line = Dom.make("p", { class: isRight ? "verdict right" : "verdict" }, verdict);
    show(moment, question(moment), line, Dom.make("p", {}, moment.reveal));
  }

  const show = ({ title }, ...parts) => Dom.fill("quiz", Dom.make("h2", {}, title), ...parts);
  const question = (moment) => Dom.make("p", { class: "question" }, moment.question);
  const isAnswered = (moment) => chosen.has(moment);
  const clear = () => Dom.fill("quiz");

  return { ask, reveal, isAnswered, clear };
})();
