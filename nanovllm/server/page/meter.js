"use strict";

/* Promised, held and used, as a bar as long as the pool. From stage 4 on more may be promised than there is. */
const Meter = (() => {
  function show({ all, promised, held, used }) {
    const share = (slots) => `${Math.min(100, (100 * slots) / all).toFixed(2)}%`;
    const label = `${used} slots used, ${held} held, ${promised} promised, of ${all}`;
    Dom.fill("meter",
      Dom.make("div", { class: "bar", role: "img", "aria-label": label },
        Dom.make("span", { class: "held", style: `width:${share(held)}` }),
        Dom.make("span", { class: "used", style: `width:${share(used)}` }),
        Dom.make("span", { class: "promised", style: `left:${share(promised)}` })),
      Dom.make("p", { "aria-hidden": "true" }, key("used", used), key("held", held), Dom.make("span", {}, `of ${all} slots`)),
      Dom.make("p", { "aria-hidden": "true" }, key("promised", `${promised}, all that the running may need`)));
  }

  const key = (what, slots) => Dom.make("span", { class: `key ${what}` }, `${what} ${slots}`);

  return { show };
})();
