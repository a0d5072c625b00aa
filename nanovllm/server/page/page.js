/* The entry point: play the runs that the page contains, or follow the server that the page comes from. */

import { byId } from "./dom.js";
import { goLive, preparePrompt } from "./live.js";
import { at, choose, follow, goTo, offerQuestion, open, playOrPause, scrub } from "./reader.js";
import { addEvent, runs, unpack } from "./tape.js";

function load() {
  const packed = byId("data").textContent.trim();
  if (!packed && location.protocol.startsWith("http")) goLive();
  if (!packed) return;
  const data = JSON.parse(packed);
  byId("lead").textContent = data.lead;
  for (const run of data.runs) for (const event of unpack(data, run)) addEvent(event, run);
  open();
}

function onKey(event) {
  if (!runs.length || event.ctrlKey || event.metaKey || event.altKey || event.target.closest("form")) return;
  const isButton = event.target.closest("button, summary") !== null, isText = event.target.closest("pre") !== null;
  if (event.key === "ArrowLeft" && !isText) goTo(at.step - 1);
  else if (event.key === "ArrowRight" && !isText) goTo(at.step + 1);
  else if (event.key === " " && !isButton) playOrPause();
  else if (event.key === "Escape" && at.block !== null) choose(at.block);
  else return;
  event.preventDefault();
}

/** Fold the queues on a narrow screen, where the grid matters most. */
function foldQueues() {
  const narrow = matchMedia("(max-width: 720px)");
  const fold = () => document.querySelectorAll("#queues details").forEach((each) => { each.open = !narrow.matches; });
  narrow.addEventListener("change", fold);
  fold();
}

byId("play").addEventListener("click", playOrPause);
byId("now").addEventListener("click", follow);
byId("slider").addEventListener("input", ({ target }) => scrub(Number(target.value)));
byId("slider").addEventListener("change", offerQuestion); // when the reader releases the slider
addEventListener("keydown", onKey);
preparePrompt();
foldQueues();
load();
