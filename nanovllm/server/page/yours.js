/* A learner's run compared with its stage's: how far they agree, and where to look (notebooks/page/play.py). */

import { fill, make } from "./dom.js";
import { makeSource } from "./panel.js";

const NOTHING = { blocks: [], seqs: [] };

/** Return the blocks and the sequences to mark at a step: those in which the run differs from its stage's. */
export const marksAt = (verdict, step) => (isOver(verdict, step) ? verdict : NOTHING);

/** Show as much of the verdict as is known at a step. Most runs have none. */
export function showVerdict(verdict, step) {
  if (!verdict) fill("yours");
  else if (!isOver(verdict, step) && !verdict.is_same) fill("yours", make("p", {}, "✓ The same so far."));
  else fill("yours", make("h2", {}, verdict.title), ...verdict.lines.map((line) => make("p", {}, line)), ...lookAt(verdict));
}

const isOver = (verdict, step) => Boolean(verdict) && step >= verdict.step;

function lookAt({ look_at: names, source }) {
  if (!names.length) return [];
  const [first, ...others] = names, more = others.length ? `, then ${others.join(", ")}` : "";
  return [make("p", { class: "question" }, `Look at ${first}${more}.`),
    source ? makeSource(source.name, source) : null];
}
