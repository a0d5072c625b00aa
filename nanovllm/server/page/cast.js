"use strict";

/* The cast: the letter, the colour and the pattern by which the reader knows a sequence everywhere on the page.
 *
 * Samples of one request are shades of one colour. A pattern says the same as a colour, for whoever sees no colours.
 */
const Cast = (() => {
  const NUM_COLOURS = 8;

  /** {label, hue, shade} of a sequence: its place among the requests, and its place among their samples. */
  function lookup(memory, seq) {
    const [request, sample] = [Memory.family(seq), seq.split(".")[1]];
    const place = Math.max(0, memory.requests.indexOf(request));
    const letter = request.length <= 2 ? request : letterOf(place);
    return { label: sample === undefined ? letter : letter + (Number(sample) + 1), hue: place % NUM_COLOURS, shade: Number(sample ?? 0) % 3 };
  }

  /** A to Z, then A1, B1, ...: a server's requests have long names. */
  function letterOf(place) {
    const round = Math.floor(place / 26);
    return String.fromCharCode(65 + (place % 26)) + (round || "");
  }

  const label = (memory, seq) => lookup(memory, seq).label;

  /** Gives an element the colours of a sequence; the style sheet says what they are. */
  function dress(element, memory, seq) {
    const { hue, shade } = lookup(memory, seq);
    element.dataset.hue = hue;
    element.dataset.shade = shade;
  }

  return { lookup, label, dress };
})();
