// A rollout's timeline, turn by turn: queueing, generating, calls, feedback.

import { el, seconds } from "./dom.js";

const NAMES = { queueing: "queueing", generating: "generating", calling: "calls", interacting: "feedback" };

export function timeline(rollout, open) {
  const spans = rollout.timeline ?? [];
  if (!spans.length) return totalsByPhase(rollout);
  const end = Math.max(...spans.map(([, start, spent]) => start + spent), 1e-9);
  let turn = -1;
  const calls = rollout.ledgers.flatMap(ledger => ledger.entries.filter(entry => entry.author === "policy"));
  const nodes = spans.map(([phase, start, spent]) => {
    if (phase === "queueing" && (turn < 0 || spans.length)) turn += 1;
    const index = Math.max(0, turn), timedCalls = phase === "calling" ? (calls[index]?.calls ?? []).filter(call => call.elapsed_s) : [];
    const label = phase === "calling" && timedCalls.length ? timedCalls.map(call => `${call.name} ${seconds(call.elapsed_s)}`).join(", ") : NAMES[phase] ?? phase;
    return el("button", { class: "span", data: { phase }, style: { left: `${start / end * 100}%`, width: `${spent / end * 100}%` },
      title: `turn ${index}, ${label}: ${seconds(spent)}`, "aria-label": `turn ${index}, ${label}: ${seconds(spent)}`, tabindex: spent / end > .01 ? 0 : -1, on: { click: () => open(index) } },
      timedCalls.map(call => el("i", { class: "inner", data: { outcome: call.outcome }, style: { width: `${Math.min(100, call.elapsed_s / (spent || 1) * 100)}%` } })));
  });
  return el("section", { class: "timeline", "aria-label": "Time" }, el("div", { class: "track" }, nodes), phaseLegend(rollout, end));
}
function phaseLegend(rollout, end) {
  const totals = {};
  for (const [phase, , spent] of rollout.timeline ?? []) totals[phase] = (totals[phase] ?? 0) + spent;
  const sums = Object.entries(rollout.timeline?.length ? totals : rollout.timing ?? {});
  return el("ul", { class: "legend" }, el("li", {}, el("b", { class: "number" }, seconds(end))),
    sums.map(([phase, spent]) => el("li", {}, el("i", { class: "swatch", data: { phase } }), NAMES[phase] ?? phase, " ", el("span", { class: "number dim" }, seconds(spent)))));
}
/** Total times by phase, for runs without a timeline. */
function totalsByPhase(rollout) {
  const sums = Object.entries(rollout.timing ?? {}), all = sums.reduce((sum, [, value]) => sum + value, 0);
  if (!all) return null;
  let start = 0;
  const nodes = sums.map(([phase, spent]) => { const left = start; start += spent; return el("span", { class: "span", data: { phase }, style: { left: `${left / all * 100}%`, width: `${spent / all * 100}%` } }); });
  return el("section", { class: "timeline", "aria-label": "Time, by phase" }, el("div", { class: "track" }, nodes), phaseLegend(rollout, all));
}
