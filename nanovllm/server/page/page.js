"use strict";

/* The page as a whole. Page.feed(event) is the one way in, for a recorded run as for one that is still going on. */
const Page = (() => {
  let isOpen = false;

  /** A snapshot, and then its events. Whoever looks at the last step follows; whoever looks back is left there. */
  function feed(event) {
    const wasAtEnd = Runs.all.length > 0 && Reader.at.step === Runs.length();
    if (!Runs.add(event)) return;
    if (!isOpen || event.kind === "snapshot") return open();
    if (wasAtEnd) Reader.at.step = Runs.length();
    Reader.show();
  }

  /** The recorded runs that the page was made with, if any. */
  function load() {
    const packed = Dom.byId("data").textContent.trim();
    if (!packed) return;
    const data = JSON.parse(packed);
    Dom.byId("lead").textContent = data.lead;
    for (const run of data.runs) for (const event of unpack(data, run)) Runs.add(event, run);
    open();
  }

  function open() {
    isOpen = true;
    Dom.byId("no-data").hidden = true;
    Dom.byId("stage").hidden = false;
    Tabs.make(Runs.all, Reader.switchTo);
    Reader.restore();
  }

  function key(event) {
    if (!isOpen || event.ctrlKey || event.metaKey || event.altKey) return;
    const isButton = event.target.closest("button, summary") !== null, isText = event.target.closest("pre") !== null;
    if (event.key === "ArrowLeft" && !isText) Reader.goTo(Reader.at.step - 1);
    else if (event.key === "ArrowRight" && !isText) Reader.goTo(Reader.at.step + 1);
    else if (event.key === " " && !isButton) Reader.playOrPause();
    else if (event.key === "Escape" && Reader.at.block !== null) Reader.choose(Reader.at.block);
    else return;
    event.preventDefault();
  }

  /** On a narrow screen the queues are folded: the grid is what a reader came for. */
  function foldQueues() {
    const narrow = matchMedia("(max-width: 720px)");
    const fold = () => document.querySelectorAll("#queues details").forEach((each) => { each.open = !narrow.matches; });
    narrow.addEventListener("change", fold);
    fold();
  }

  function start() {
    View.prepare(Reader);
    Dom.byId("play").addEventListener("click", Reader.playOrPause);
    Dom.byId("slider").addEventListener("input", ({ target }) => Reader.scrub(Number(target.value)));
    Dom.byId("slider").addEventListener("change", Reader.offer); // where the reader lets go of it
    addEventListener("keydown", key);
    addEventListener("hashchange", Reader.restore);
    foldQueues();
    load();
  }

  return { feed, start };
})();

Page.start();
