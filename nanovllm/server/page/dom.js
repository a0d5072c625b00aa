"use strict";

/* The few things that every part of the page does with the document. */
const Dom = (() => {
  const byId = (id) => document.getElementById(id);

  /** make("p", {class: "note"}, "text", child, ...): an element; attributes and children that are null are left out. */
  function make(tag, attributes = {}, ...children) {
    const element = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) if (value !== null) set(element, name, value);
    element.append(...children.filter((child) => child !== null));
    return element;
  }

  /** A style goes another way: a server's page may forbid the attribute. */
  function set(element, name, value) {
    if (name === "style") element.style.cssText = value;
    else element.setAttribute(name, value);
  }

  function fill(id, ...children) {
    byId(id).replaceChildren(...children.filter((child) => child !== null));
  }

  /** A sequence's letter, in its colour and pattern. */
  function tag(memory, seq) {
    const element = make("span", { class: "tag" }, Cast.label(memory, seq));
    Cast.dress(element, memory, seq);
    return element;
  }

  function svg(tag, attributes = {}) {
    const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    return element;
  }

  return { byId, make, fill, tag, svg };
})();
