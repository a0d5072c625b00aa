// Run the functions that a program exports: `node run.mjs results program.mjs [word]`. It appends one line of JSON to the
// file `results` for each.
import { appendFileSync, readFileSync } from "node:fs";
import { pathToFileURL } from "node:url";

const [results, path, word = ""] = process.argv.slice(2);
const program = await import(pathToFileURL(path));
const inOrder = [...readFileSync(path, "utf8").matchAll(/^export async function (\w+)/gm)].map((match) => match[1]);
for (const name of inOrder.filter((name) => name.includes(word))) {
  let error = null;
  try {
    await program[name]();
  } catch (raised) {
    console.error(raised);
    error = `${raised.name}: ${raised.message}`;
  }
  appendFileSync(results, `${JSON.stringify({ function: name, error })}\n`);
}
