"use strict";

/* The source of a function: where it stands, and its lines. What explains is pale, what runs is not. */
const Source = (() => {
  function make(name, { file, line, text }) {
    const caption = Dom.make("figcaption", {}, Dom.make("b", {}, name), ` ${file}:${line}`);
    return Dom.make("figure", {}, caption, Dom.make("pre", { tabindex: 0 }, ...lines(text)));
  }

  /** A line that is too long goes on under its own beginning. */
  function lines(text) {
    let isDocstring = false;
    return text.split("\n").map((line) => {
      const num_quotes = line.split('"""').length - 1, wasDocstring = isDocstring;
      if (num_quotes === 1) isDocstring = !isDocstring;
      const isPale = wasDocstring || num_quotes > 0 || line.trim().startsWith("#");
      const style = `--indent: ${line.length - line.trimStart().length + 2}`;
      return Dom.make("span", { class: isPale ? "line pale" : "line", style }, ...withComment(line, isPale), "\n");
    });
  }

  function withComment(line, isPale) {
    const at = line.indexOf("  # ");
    return at < 0 || isPale ? [line] : [line.slice(0, at), Dom.make("span", { class: "pale" }, line.slice(at))];
  }

  return { make };
})();
