"use strict";

/* The compact form of recorded runs, as `make page` writes it into the page, back into snapshots and events.
 *
 *     kinds     {taken: ["block", "seq$", "index", "why$", "by$"], ...}: the columns; $ is a number in `strings`
 *     strings   each text once
 *     events    [[the kind's number, a value a column, ...], ...]; the step is counted here
 */
function* unpack({ kinds, strings }, { snapshot, events }) {
  const names = Object.keys(kinds);
  let step = 1;
  yield snapshot;
  for (const [number, ...values] of events) {
    const kind = names[number], event = { kind, step };
    kinds[kind].forEach((column, i) => {
      const isText = column.endsWith("$"), value = values[i] ?? null;
      event[isText ? column.slice(0, -1) : column] = isText && value !== null ? strings[value] : value;
    });
    yield event;
    if (kind === "step") step += 1;
  }
}
