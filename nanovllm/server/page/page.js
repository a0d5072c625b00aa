"use strict";

/* The page as a whole. Page.feed(event) is the one way in, for a recorded run as for one that is still going on. */
const Page = (() => {
  let isOpen = false;

  /** A snapshot, and then its events. Whoever looks at the last step follows; whoever looks back is left there. */
  function feed(event) {
    const before = Runs.all.at(-1);
    if (!Runs.add(event)) return;
    if (Runs.all.at(-1) !== before) begin(event);
    Follow.due();
  }

  /** No more events come for now: what happened since the last step is shown too. */
  function settle() {
    Runs.all.at(-1).tape.settle();
    Follow.due();
  }

  /** The recorded runs that the page was made with, or those of the server that it comes from. */
  function load() {
    const packed = Dom.byId("data").textContent.trim(), isServed = location.protocol.startsWith("http");
    if (!packed && isServed) serve();
    if (!packed) return;
    const data = JSON.parse(packed);
    Dom.byId("lead").textContent = data.lead;
    for (const run of data.runs) for (const event of unpack(data, run)) Runs.add(event, run);
    open();
  }

  function serve() {
    document.title = Dom.byId("title").textContent = "The pool, live";
    Dom.byId("no-data").hidden = true;
    Feed.start();
  }

  /** A live run. */
  function begin({ pool }) {
    Status.pool(pool);
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
    if (event.target.closest("form")) return;
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
    Dom.byId("now").addEventListener("click", Follow.start);
    Dom.byId("slider").addEventListener("input", ({ target }) => Reader.scrub(Number(target.value)));
    Dom.byId("slider").addEventListener("change", Reader.offer); // where the reader lets go of it
    addEventListener("keydown", key);
    addEventListener("hashchange", Reader.restore);
    Prompt.start();
    foldQueues();
    load();
  }

  return { feed, settle, start };
})();

Page.start();
