"use strict";

/* A square of the grid: a band for each holder, how much of it is filled, a letter, a count. */
const Square = (() => {
  const ruler = Dom.make("canvas").getContext("2d"), widths = {};

  /** `cell` is as cells.js says. */
  function paint(square, { status, bands, count, origin, isTouched }, memory) {
    const isShared = count > 1 && bands.every(({ from }) => from === 0); // in stage 1 two pieces lie side by side
    const shown = bands.map((band, i) => paintBand(band, isShared ? [i, bands.length] : [0, 1], memory));
    if (status === "idle") shown.push(paintGhost(origin, memory));
    if (isShared) shown.push(letter(together(bands, memory)), Dom.make("span", { class: "count" }, String(count)));
    else bands.forEach(({ seq, from, to }, i) => {
      if (to - from > 2) shown[i].append(letter(Cast.label(memory, seq)));
    });
    square.className = `square ${status}${isTouched ? " touched" : ""}`;
    square.replaceChildren(...shown);
  }

  /** It is the place `top` of `of` from above: who share a block lie over each other in it. */
  function paintBand({ seq, from, to, filled }, [top, of], memory) {
    const band = Dom.make("span", { class: "band" }, Dom.make("span", { class: "fill" }));
    const numbers = { from, to, filled, top, of };
    for (const [name, value] of Object.entries(numbers)) band.style.setProperty(`--${name}`, value);
    Cast.dress(band, memory, seq);
    return band;
  }

  /** Nobody holds it, and a text is still in it: of an author that the page may not have seen. */
  function paintGhost(origin, memory) {
    const ghost = Dom.make("span", { class: "ghost" });
    if (!origin) return ghost;
    Cast.dress(ghost, memory, origin.seq);
    ghost.append(letter(Cast.label(memory, origin.seq)));
    return ghost;
  }

  /** How large it may be in its square, the style sheet says. */
  const letter = (text) => Dom.make("span", { class: "letter", style: `--ems:${widthOf(text)}` }, text);

  /** In ems: a W is three times as wide as an I. */
  function widthOf(text) {
    if (!ruler.font.startsWith("650")) ruler.font = `650 100px ${getComputedStyle(document.body).fontFamily}`;
    return (widths[text] ??= ruler.measureText(text).width / 100);
  }

  /** Samples of one request are told by its letter, strangers by the first one's. */
  function together(bands, memory) {
    const families = new Set(bands.map(({ seq }) => Memory.family(seq)));
    return families.size === 1 ? Cast.label(memory, [...families][0]) : `${Cast.label(memory, bands[0].seq)}+`;
  }

  /** The same in words, for whoever does not see it. */
  function inWords({ status, bands, count, origin }, memory) {
    const name = (seq) => Cast.label(memory, seq);
    const holders = bands.map(({ seq, filled, from, to }) => `${name(seq)}, ${filled} of ${to - from} slots filled`);
    const text = origin ? ` with a text of ${name(origin.seq)}` : "";
    const what = { held: `held by ${holders.join("; ")}`, idle: `idle${text}`, free: "free" }[status];
    return count > 1 ? `${what}, ${count} holders` : what;
  }

  return { paint, inWords };
})();
