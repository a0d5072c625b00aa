"use strict";

/* The cast: the letter, the colour and the pattern by which the reader knows a sequence everywhere on the page.
 *
 * Samples of one request are shades of one colour. A pattern says the same as a colour, for whoever sees no colours.
 */
const Cast = (() => {
  const NUM_COLOURS = 8, NUM_SHADES = 3;

  /** "F" for a request, "F2" for its second sample. */
  function label(memory, seq) {
    const [request, sample] = [Memory.family(seq), sampleOf(seq)];
    const letter = request.length <= 2 ? request : letterOf(placeOf(memory, request));
    return sample === null ? letter : letter + (sample + 1);
  }

  /** Gives an element the colours of a sequence; the style sheet says what they are. */
  function dress(element, memory, seq) {
    element.dataset.hue = placeOf(memory, Memory.family(seq)) % NUM_COLOURS;
    element.dataset.shade = (sampleOf(seq) ?? 0) % NUM_SHADES;
  }

  const placeOf = (memory, request) => memory.places[request] ?? 0;

  function sampleOf(seq) {
    const found = /\.(?:beam)?(\d+)$/.exec(seq);
    return found ? Number(found[1]) : null;
  }

  /** A to Z, AA to ZZ, and again from A: the names of a server's requests are too long for a square. */
  function letterOf(place) {
    const at = place % (26 + 26 * 26), letter = (i) => String.fromCharCode(65 + i);
    return at < 26 ? letter(at) : letter(Math.floor(at / 26) - 1) + letter(at % 26);
  }

  return { label, dress };
})();
