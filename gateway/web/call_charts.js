// Inline charts and chips for calls (outcomes, durations, phases), each with a text equivalent.
import { el, number, percent, seconds } from "./dom.js";

export const OUTCOMES = ["ok", "error", "invalid", "timeout", "unavailable", "unknown", "cancelled"];
/** An explanation of each outcome. */
export const MEANING = {
  ok: "The tool answered.",
  error: "The tool reported an error.",
  invalid: "The caller's error: no such tool, or arguments that do not match its schema.",
  timeout: "No answer within the deadline; an infrastructure failure.",
  unavailable: "Never delivered: the server is down or busy. Repeating it is safe.",
  unknown: "Delivered, but no answer came back. Repeating it may not be safe.",
  cancelled: "The caller disconnected.",
};
/** What the policy is not told about a call that failed; nothing where it only repeats the outcome's meaning. */
export const operatorNote = ({ outcome, reason }) => reason && `${reason}.`.toLowerCase() !== MEANING[outcome]?.toLowerCase() ? el("p", { class: "dim" }, `For the operator: ${reason}`) : null;

export function outcomeChip(outcome) {
  return el("span", { class: "chip", data: { outcome }, title: MEANING[outcome] }, outcome);
}

/** Outcomes as one bar, each as wide as its share. */
export function outcomeBar(outcomes) {
  const shown = OUTCOMES.filter(name => outcomes[name]);
  const total = shown.reduce((sum, name) => sum + outcomes[name], 0);
  const words = shown.map(name => `${outcomes[name]} ${name}`).join(", ") || "no calls";
  return el("span", { class: "shares", role: "img", "aria-label": words,
      title: shown.map(name => `${name}: ${outcomes[name]} (${percent(outcomes[name] / total)})`).join("\n") },
    shown.map(name => el("i", { data: { outcome: name }, style: { "flex-grow": outcomes[name] } })));
}

export const atMost = value => value === Infinity ? "longer" : seconds(value);

/** The phases of one call as a bar with a legend. */
export function phaseStrip(timing, whole) {
  const known = ["queue", "connect", "upstream", "parse"].filter(name => timing[name] > 0);
  if (!known.length) return null;
  const rest = Math.max(0, whole - known.reduce((sum, name) => sum + timing[name], 0));
  const all = [...known.map(name => [name, timing[name]]), ["other", rest]].filter(([, value]) => value / whole > .005);
  return el("div", { class: "phases" },
    el("span", { class: "shares wide", "aria-hidden": "true" },
      all.map(([name, value]) => el("i", { data: { phase: name }, style: { "flex-grow": value / whole * 100 }, title: name }))),
    el("ul", { class: "row tiny dim number" }, all.map(([name, value]) =>
      el("li", { class: "phase", data: { phase: name } }, `${name} ${seconds(value)}`))));
}

export const rewardText = value => value === null || value === undefined ? "" : `reward ${number(value)}`;
