// Where a rollout's time went, turn by turn: waiting for a place, writing, each call, feedback.

import { el, seconds } from "./dom.js";

const NAMES = { queueing: "queueing", generating: "generating", calling: "calls", interacting: "feedback" };

export function strip(one, open) {
  const spans = one.timeline ?? [];
  if (!spans.length) return total(one);
  const end = Math.max(...spans.map(([, began, spent]) => began + spent), 1e-9);
  let turn = -1;
  const calls = one.ledgers.flatMap(ledger => ledger.entries.filter(entry => entry.author === "policy"));
  const nodes = spans.map(([phase, began, spent]) => {
    if (phase === "queueing" && (turn < 0 || spans.length)) turn += 1;
    const here = Math.max(0, turn), inside = phase === "calling" ? (calls[here]?.calls ?? []).filter(call => call.elapsed_s) : [];
    const what = phase === "calling" && inside.length ? inside.map(call => `${call.name} ${seconds(call.elapsed_s)}`).join(", ") : NAMES[phase] ?? phase;
    return el("button", { class: "span", data: { phase }, style: { left: `${began / end * 100}%`, width: `${spent / end * 100}%` },
      title: `turn ${here}, ${what}: ${seconds(spent)}`, "aria-label": `turn ${here}, ${what}: ${seconds(spent)}`, tabindex: spent / end > .01 ? 0 : -1, on: { click: () => open(here) } },
      inside.map(call => el("i", { class: "inner", data: { outcome: call.outcome }, style: { width: `${Math.min(100, call.elapsed_s / (spent || 1) * 100)}%` } })));
  });
  return el("section", { class: "strip", "aria-label": "Time" }, el("div", { class: "track" }, nodes), key(one, end));
}
function key(one, end) {
  const known = {};
  for (const [phase, , spent] of one.timeline ?? []) known[phase] = (known[phase] ?? 0) + spent;
  const sums = Object.entries(one.timeline?.length ? known : one.timing ?? {});
  return el("ul", { class: "legend" }, el("li", {}, el("b", { class: "number" }, seconds(end))),
    sums.map(([phase, spent]) => el("li", {}, el("i", { class: "swatch", data: { phase } }), NAMES[phase] ?? phase, " ", el("span", { class: "number dim" }, seconds(spent)))));
}
/** Of runs that did not keep when each phase came. */
function total(one) {
  const sums = Object.entries(one.timing ?? {}), all = sums.reduce((sum, [, value]) => sum + value, 0);
  if (!all) return null;
  let began = 0;
  const nodes = sums.map(([phase, spent]) => { const left = began; began += spent; return el("span", { class: "span", data: { phase }, style: { left: `${left / all * 100}%`, width: `${spent / all * 100}%` } }); });
  return el("section", { class: "strip", "aria-label": "Time, by phase" }, el("div", { class: "track" }, nodes), key(one, all));
}
