"use strict";

/* Promised, held and used, as a bar as long as the pool. From stage 4 on more may be promised than there is. */
const Meter = (() => {
  function show(totals) {
    const share = (slots) => `${Math.min(100, (100 * slots) / totals.all).toFixed(2)}%`;
    const bar = Dom.make("div", { class: "bar", role: "img", "aria-label": `${totals.used} slots used, ${totals.held} held, ${totals.promised} promised, of ${totals.all}` },
      Dom.make("span", { class: "held", style: `width:${share(totals.held)}` }),
      Dom.make("span", { class: "used", style: `width:${share(totals.used)}` }),
      Dom.make("span", { class: totals.promised > totals.all ? "promised beyond" : "promised", style: `left:${share(totals.promised)}` }));
    const key = Dom.make("p", {}, ...["used", "held", "promised"].map((what) => Dom.make("span", { class: `key ${what}` }, `${what} ${totals[what]}`)),
      Dom.make("span", {}, `of ${totals.all} slots`));
    Dom.byId("meter").replaceChildren(bar, key);
  }

  return { show };
})();
