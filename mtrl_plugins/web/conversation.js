// An entry of the conversation, and its images, audio and video: large there, small at their tokens. All content becomes
// text nodes: text of models and tools is never markup.

import { count, el, number, seconds, bytes } from "./dom.js";
import { mediaUrl } from "./data.js";

const LINE_CHARS = 72; // characters that fit into a line
const FOLD_CHARS = 1400; // longer messages are folded, except the policy's

export function conversationEntry(run, entry) {
  const policy = entry.author === "policy", remaining = mediaOf(entry);
  return el("div", { class: "message" },
    el("p", { class: "author row" }, el("span", { class: "chip", data: { author: entry.author } }, entry.author),
      el("span", { class: "dim tiny" }, policy ? `turn ${entry.turn}` : entry.source ?? ""),
      entry.author !== "tool" || !(entry.outcomes?.length === 1) ? null : el("span", { class: "chip", data: { outcome: entry.outcomes[0] } }, entry.outcomes[0]),
      entry.reward !== undefined && entry.reward !== null ? el("span", { class: "score number" }, `${entry.author === "feedback" ? "score" : "reward"} ${number(entry.reward, 3)}`) : null),
    policy ? policyTurn(entry) : (entry.messages ?? []).map((message, index) => messageNodes(run, message, entry, index, remaining)),
    [...remaining].map(() => nextMedia(run, entry, remaining)), resourceNodes(entry));
}

function policyTurn(entry) {
  const message = entry.messages?.[0] ?? {}, reasoning = message.reasoning_content ?? message.reasoning;
  const content = contentText(message.content);
  return [
    reasoning ? el("details", { class: "fold reasoning" }, el("summary", {}, `Reasoning, ${count(reasoning.trim().split(/\s+/).length, "word")}`), el("p", { class: "prose" }, reasoning)) : null,
    content.trim() ? el("p", { class: "prose" }, content) : null,
    (entry.calls ?? []).map(call => el("div", { class: "call" },
      el("p", { class: "row" }, el("b", { class: "mono" }, call.name ?? "a malformed call"),
        el("span", { class: "chip", data: { outcome: call.outcome ?? "cancelled" } }, call.outcome ?? "unanswered"),
        call.elapsed_s === undefined || call.elapsed_s === null ? null : el("span", { class: "dim tiny number" }, seconds(call.elapsed_s))),
      call.arguments ? prettyText(call.arguments) : null)),
    !reasoning && !content.trim() && !(entry.calls ?? []).length ? el("p", { class: "dim small" }, entry.ids?.length ? "only an end token" : "nothing") : null,
  ];
}

function messageNodes(run, message, entry, index, remaining) {
  const content = contentText(message.content), system = message.role === "system" || message.role === "developer";
  const plain = entry.author === "tool" ? prettyText : value => el("p", { class: "prose" }, value || "(nothing)");
  const body = contentParts(run, entry, message.content, remaining, plain);
  const outcome = entry.author === "tool" && entry.outcomes?.length > 1 ? el("span", { class: "chip", data: { outcome: entry.outcomes[index] } }, entry.outcomes[index]) : null;
  const head = entry.messages.length > 1 && !system ? el("p", { class: "label row" }, message.name ?? message.role, outcome) : outcome;
  if (system || content.length > FOLD_CHARS) {
    return el("details", { class: "fold" }, el("summary", {}, `${system ? "System message" : message.role}, ${count(content.length, "character")}`), body);
  }
  return [head, body];
}

/** Text, formatted if it is JSON; what fits into a line stays in one line. */
function prettyText(value) {
  let nextMedia = value;
  try { const read = JSON.parse(value); if (read && typeof read === "object") nextMedia = formatJson(read, ""); } catch { /* it is text */ }
  if (nextMedia.length <= LINE_CHARS && !nextMedia.includes("\n")) return el("p", { class: "prose mono result" }, nextMedia || "(nothing)");
  return el("pre", { class: "wrap" }, nextMedia);
}
function formatJson(value, indent) {
  const flat = JSON.stringify(value, null, 1).replace(/\n\s*/g, " ");
  if (value === null || typeof value !== "object" || flat.length + indent.length <= LINE_CHARS) return flat.replace(/^\[ | \]$/g, end => end.trim());
  const inner = `${indent}  `, list = Array.isArray(value);
  const lines = Object.entries(value).map(([name, item]) => `${inner}${list ? "" : `${JSON.stringify(name)}: `}${formatJson(item, inner)}`);
  return `${list ? "[" : "{"}\n${lines.join(",\n")}\n${indent}${list ? "]" : "}"}`;
}
function contentText(content) {
  if (typeof content === "string") return content;
  if (!Array.isArray(content)) return content === undefined || content === null ? "" : JSON.stringify(content, null, 2);
  return content.map(part => part.type === "text" ? part.text : `[${part.type ?? "?"}]`).join("\n");
}

/** The parts of a message in order; each media part takes the next media of the entry. */
function contentParts(run, entry, content, remaining, plain) {
  if (!Array.isArray(content) || !content.some(part => part.type !== "text")) return plain(contentText(content));
  return content.map(part => part.type === "text" ? part.text && plain(part.text)
    : remaining.length ? nextMedia(run, entry, remaining) : plain(`[${part.type ?? "?"}]`));
}
function nextMedia(run, entry, remaining) {
  const part = remaining.shift();
  return mediaFigure(run.name, part, `${part.kind} of ${entry.source || entry.author}`);
}
function resourceNodes(entry) {
  return (entry.parts ?? []).filter(part => part.kind === "resource").map(part =>
    el("p", { class: "small" }, el("span", { class: "tag" }, "resource"), " ", el("span", { class: "mono" }, part.uri), part.text ? el("pre", { class: "wrap" }, part.text) : null));
}

const TAGS = { image: "img", audio: "audio", video: "video" };
const SMALL_PIXELS = 96; // images narrower than this are enlarged: those of small models are a few pixels wide
const isMedia = part => part.kind in TAGS;
export const mediaOf = entry => (entry.parts ?? []).filter(isMedia);

/** An image, audio or video player with a caption. */
function mediaFigure(run, part, name) {
  const figure = el("figure", { class: "media" }, el("figcaption", { class: "dim tiny" }, `${part.kind}, ${part.mime}, ${bytes(part.bytes)}`));
  mediaUrl(run, part.sha256, part.mime).then(src => {
    if (!src) throw new Error("no bytes");
    figure.prepend(part.kind === "image" ? image(src, name) : el(TAGS[part.kind], { src, controls: true, preload: "metadata", "aria-label": name }));
  }).catch(() => figure.append(el("span", { class: "dim tiny" }, " cannot be read")));
  return figure;
}

/** A thumbnail of an image, or the kind of other media. */
export function mediaThumbnail(run, part) {
  const node = el("span", { class: "thumbnail", title: `${part.kind}, ${part.mime}` });
  if (part.kind !== "image") node.append(part.kind);
  else mediaUrl(run, part.sha256, part.mime).then(src => { if (src) node.append(image(src, "")); }).catch(() => node.append(part.kind));
  return node;
}

function image(src, alt) {
  const node = el("img", { src, alt, decoding: "async" });
  node.addEventListener("load", () => node.classList.toggle("tiny", node.naturalWidth < SMALL_PIXELS), { once: true });
  return node;
}
