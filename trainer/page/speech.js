// An entry as a person reads it. Whatever it holds becomes text: nothing that was written elsewhere is ever markup.

import { count, el, number, seconds } from "./dom.js";
import { mediaOf, medium } from "./medium.js";

const SHORT = 72; // characters that stand well in one line
const LONG = 1400; // characters from which on what is not the policy's own is folded

export function entry(run, one) {
  const policy = one.author === "policy", left = mediaOf(one);
  return el("div", { class: "speech" },
    el("p", { class: "who row" }, el("span", { class: "chip", data: { author: one.author } }, one.author),
      el("span", { class: "dim tiny" }, policy ? `turn ${one.turn}` : one.source ?? ""),
      one.author !== "tool" || !(one.outcomes?.length === 1) ? null : el("span", { class: "chip", data: { outcome: one.outcomes[0] } }, one.outcomes[0]),
      one.reward !== undefined && one.reward !== null ? el("span", { class: "score number" }, `${one.author === "feedback" ? "score" : "reward"} ${number(one.reward, 3)}`) : null),
    policy ? turn(one) : (one.messages ?? []).map((message, place) => said(run, message, one, place, left)),
    [...left].map(() => shown(run, one, left)), resources(one));
}

function turn(one) {
  const message = one.messages?.[0] ?? {}, reasoning = message.reasoning_content ?? message.reasoning;
  const content = text(message.content);
  return [
    reasoning ? el("details", { class: "fold reasoning" }, el("summary", {}, `Reasoning, ${count(reasoning.trim().split(/\s+/).length, "word")}`), el("p", { class: "prose" }, reasoning)) : null,
    content.trim() ? el("p", { class: "prose" }, content) : null,
    (one.calls ?? []).map(call => el("div", { class: "call" },
      el("p", { class: "row" }, el("b", { class: "mono" }, call.name ?? "a malformed call"),
        el("span", { class: "chip", data: { outcome: call.outcome ?? "cancelled" } }, call.outcome ?? "unanswered"),
        call.elapsed_s === undefined || call.elapsed_s === null ? null : el("span", { class: "dim tiny number" }, seconds(call.elapsed_s))),
      call.arguments ? pretty(call.arguments) : null)),
    !reasoning && !content.trim() && !(one.calls ?? []).length ? el("p", { class: "dim small" }, one.ids?.length ? "nothing but what ended the turn" : "nothing") : null,
  ];
}

function said(run, message, one, place, left) {
  const content = text(message.content), system = message.role === "system" || message.role === "developer";
  const plain = one.author === "tool" ? pretty : given => el("p", { class: "prose" }, given || "(nothing)");
  const body = parts(run, one, message.content, left, plain);
  const outcome = one.author === "tool" && one.outcomes?.length > 1 ? el("span", { class: "chip", data: { outcome: one.outcomes[place] } }, one.outcomes[place]) : null;
  const head = one.messages.length > 1 && !system ? el("p", { class: "label row" }, message.name ?? message.role, outcome) : outcome;
  if (system || content.length > LONG) {
    return el("details", { class: "fold" }, el("summary", {}, `${system ? "System message" : message.role}, ${count(content.length, "character")}`), body);
  }
  return [head, body];
}

/** JSON with its lines, where it is JSON: what fits into one line stands in one. */
function pretty(given) {
  let shown = given;
  try { const read = JSON.parse(given); if (read && typeof read === "object") shown = laid(read, ""); } catch { /* it is text */ }
  if (shown.length <= SHORT && !shown.includes("\n")) return el("p", { class: "prose mono result" }, shown || "(nothing)");
  return el("pre", { class: "wrap" }, shown);
}
function laid(value, indent) {
  const flat = JSON.stringify(value, null, 1).replace(/\n\s*/g, " ");
  if (value === null || typeof value !== "object" || flat.length + indent.length <= SHORT) return flat.replace(/^\[ | \]$/g, end => end.trim());
  const inner = `${indent}  `, list = Array.isArray(value);
  const lines = Object.entries(value).map(([name, one]) => `${inner}${list ? "" : `${JSON.stringify(name)}: `}${laid(one, inner)}`);
  return `${list ? "[" : "{"}\n${lines.join(",\n")}\n${indent}${list ? "]" : "}"}`;
}
function text(content) {
  if (typeof content === "string") return content;
  if (!Array.isArray(content)) return content === undefined || content === null ? "" : JSON.stringify(content, null, 2);
  return content.map(part => part.type === "text" ? part.text : `[${part.type ?? "?"}]`).join("\n");
}

/** Each part of a message where it stands; a medium is the next of those that came with the entry. */
function parts(run, one, content, left, plain) {
  if (!Array.isArray(content) || !content.some(part => part.type !== "text")) return plain(text(content));
  return content.map(part => part.type === "text" ? part.text && plain(part.text)
    : left.length ? shown(run, one, left) : plain(`[${part.type ?? "?"}]`));
}
function shown(run, one, left) {
  const part = left.shift();
  return medium(run.name, part, `${part.kind} of ${one.source || one.author}`);
}
function resources(one) {
  return (one.parts ?? []).filter(part => part.kind === "resource").map(part =>
    el("p", { class: "small" }, el("span", { class: "tag" }, "resource"), " ", el("span", { class: "mono" }, part.uri), part.text ? el("pre", { class: "wrap" }, part.text) : null));
}
