// The tokens of a ledger: their colours in each mode, the details of a token, and how they are drawn lazily: a rollout
// may have more tokens than a page can hold as nodes, so chunks of tokens are plain text until they are about to be visible.

import { bytes, count, el, number, percent, put } from "./dom.js";
import { mediaOf, mediaThumbnail } from "./conversation.js";

export const MODES = [["author", "Author"], ["trained", "Trained"], ["logprob", "Logprob"], ["surprise", "Surprise"], ["advantage", "Advantage"], ["version", "Version"]];
const BITS = Math.LN2, EPSILON = 1e-6;

/** All tokens of a ledger with what is known about each. */
export function ledgerTokens(ledger) {
  const turns = ledger.entries.filter(entry => entry.author === "policy");
  return ledger.entries.flatMap(entry => {
    const laterTurns = turns.filter(turn => turn.start > entry.start), media = mediaOf(entry);
    let shift = entry.seen - entry.start;
    return (entry.ids ?? []).map((id, index) => {
      const ended = (entry.spans ?? []).findIndex(span => span[1] === index && span[0] < index);
      if (ended >= 0 && entry.widths) shift += entry.widths[ended] - (entry.spans[ended][1] - entry.spans[ended][0]);
      const span = (entry.spans ?? []).findIndex(span => span[0] <= index && index < span[1]), at = entry.start + index, expanded = at + shift;
      return { at, id, entry, piece: entry.pieces?.[index], logprob: entry.logprobs?.[index],
        advantage: entry.advantages?.[index], weight: entry.weights?.[index], version: entry.versions?.[index] ?? entry.version,
        shows: media[span], first: entry.spans?.[span]?.[0] === index, width: entry.widths?.[span],
        reused: () => laterTurns.filter(turn => (turn.cached ?? 0) > expanded).length, asked: laterTurns.length };
    });
  });
}
export const isTrained = token => token.entry.trained && (token.weight === undefined || token.weight > 0);

/** A token's colour and its strength in a mode; null for none. */
function tint(mode, token, scale) {
  if (mode === "author") return [`var(--${token.entry.author})`, .2];
  if (mode === "trained") return isTrained(token) ? ["var(--ok)", .26] : null;
  if (token.entry.author !== "policy") return null;
  if (mode === "logprob") return ["var(--policy)", Math.min(1, -token.logprob / scale.logprob) * .42];
  if (mode === "surprise") return -token.logprob / BITS < 1 ? null : ["var(--invalid)", Math.min(1, -token.logprob / BITS / 8) * .46];
  if (mode === "advantage") return token.advantage ? [token.advantage > 0 ? "var(--ok)" : "var(--error)", .1 + Math.min(1, Math.abs(token.advantage) / scale.advantage) * .32] : null;
  if (mode === "version") return token.version === undefined ? null : [`var(--curve-${(token.version - scale.oldest) % 6 + 1})`, .28];
  return null;
}

export function modeLegend(mode, all) {
  const swatch = (hue, part, text) => el("li", {}, el("i", { class: "swatch", style: { background: `color-mix(in oklab, ${hue} ${part * 100}%, var(--paper))` } }), text);
  const scale = tokenScale(all);
  const ramp = (hue, part, low, high) => el("li", {}, el("span", {}, low), el("i", { class: "ramp", style: { background: `linear-gradient(to right, var(--paper), color-mix(in oklab, ${hue} ${part * 100}%, var(--paper)))` } }), el("span", {}, high));
  const dimText = text => el("li", { class: "dim" }, text);
  const items = {
    author: () => [...new Set(all.map(token => token.entry.author))].map(author => swatch(`var(--${author})`, .2, author)),
    trained: () => [swatch("var(--ok)", .26, `trained: ${all.filter(isTrained).length}`), swatch("var(--paper)", 0, `not: ${all.filter(token => !isTrained(token)).length}`)],
    logprob: () => [ramp("var(--policy)", .42, "0", number(-scale.logprob, 3))],
    surprise: () => [ramp("var(--invalid)", .46, "under 1 bit", "8 bits")],
    advantage: () => scale.known && scale.advantage <= EPSILON ? [dimText("0 everywhere: all siblings have the same reward")] : scale.known ? [swatch("var(--error)", .3, `down to ${number(-scale.advantage, 3)}`), swatch("var(--ok)", .3, `up to ${number(scale.advantage, 3)}`)] : [dimText("no step trained on this rollout, or it is not stored")],
    version: () => [...new Set(all.map(token => token.version).filter(token => token !== undefined))].map(token => swatch(`var(--curve-${(token - scale.oldest) % 6 + 1})`, .28, `version ${token}`)),
  };
  return el("ul", { class: "legend" }, items[mode]());
}
export function tokenScale(all) {
  const scale = { logprob: .5, known: false, advantage: EPSILON, oldest: Infinity };
  for (const { logprob, advantage, version } of all) {
    if (Number.isFinite(logprob)) scale.logprob = Math.max(scale.logprob, -logprob);
    if (advantage !== undefined) Object.assign(scale, { known: true, advantage: Math.max(scale.advantage, Math.abs(advantage)) });
    scale.oldest = Math.min(scale.oldest, version ?? Infinity);
  }
  return scale;
}

/** Draws tokens as elements, with thumbnails of media at their first token. */
export function paintTokens(run, parent, all, mode, scale) {
  put(parent, all.map(token => {
    const text = token.piece ?? String(token.id), colour = tint(mode, token, scale);
    const node = el("span", { class: token.piece === undefined ? "t id" : "t", id: `t${token.at}`, data: { at: token.at, author: token.entry.author } });
    if (colour && colour[1] > .005) node.style.setProperty("background", `color-mix(in oklab, ${colour[0]} ${colour[1] * 100}%, transparent)`);
    const [lead, ...rest] = text.split("\n");
    node.append(lead, ...rest.flatMap(line => [el("span", { class: "nl", "aria-hidden": true }, "↵"), "\n", line]));
    if (!text) node.append(el("span", { class: "nl", title: "part of the previous character" }, "·"));
    if (token.shows && token.first) node.prepend(mediaThumbnail(run, token.shows));
    return [node, token.piece === undefined ? " " : null];
  }));
}

/** The details of a token. */
export function tokenDetails(token, rollout) {
  const row = (name, ...value) => el("div", {}, el("dt", {}, name), el("dd", {}, value));
  const text = token.piece === undefined ? `id ${token.id}` : `“${token.piece.replaceAll("\n", "↵")}”`;
  const policy = token.entry.author === "policy";
  return [
    el("div", { class: "row which" }, el("b", { class: "mono" }, text), el("span", { class: "dim number" }, `token ${token.at} · id ${token.id}`),
      el("span", { class: "chip", data: { author: token.entry.author } }, token.entry.author + (token.entry.turn !== undefined && policy ? `, turn ${token.entry.turn}` : ""))),
    el("dl", { class: "number" },
      policy ? row("logprob", number(token.logprob, 4)) : null,
      policy ? row("probability", percent(Math.exp(token.logprob))) : null,
      policy ? row("surprise", `${number(-token.logprob / BITS, 3)} bits`) : null,
      token.advantage !== undefined && policy ? row("advantage", number(token.advantage, 3)) : null,
      token.weight !== undefined && policy && token.weight !== 1 ? row("weight", number(token.weight, 3)) : null,
      token.version !== undefined && token.version !== null ? row("version", token.version) : null,
      token.shows ? row("stands for", `${token.shows.kind}, ${bytes(token.shows.bytes)}${token.width ? `, expanded to ${count(token.width, "token")}` : ""}`) : null,
      token.asked ? row("cached", `${token.reused()} of ${token.asked} times`) : null),
    el("p", { class: "because", data: { trained: isTrained(token) ? "yes" : "no" } }, el("b", {}, isTrained(token) ? "Trained" : "Not trained"), `: ${isTrained(token) ? token.entry.because : token.entry.because_not ?? token.entry.because}.`),
  ];
}

const CHUNK_TOKENS = 400, MAX_CHUNK_TOKENS = 1600; // a chunk ends at the first line end between these sizes

/** Chunks of tokens; `paint` replaces a chunk's text by nodes. */
export function tokenChunks(paint) {
  const chunks = new Map();
  const draw = chunk => { if (chunk.drawn) return; chunk.drawn = true; observer.unobserve(chunk.node); paint(chunk.node, chunk.tokens); };
  const observer = new IntersectionObserver(entries => entries.filter(chunk => chunk.isIntersecting).forEach(chunk => draw(chunks.get(chunk.target))), { rootMargin: "100%" });
  const add = tokens => {
    const chunk = { node: el("span", { class: "chunk" }, plainText(tokens)), tokens, drawn: false };
    chunks.set(chunk.node, chunk);
    observer.observe(chunk.node);
    return chunk.node;
  };
  return {
    fill: (parent, tokens) => put(parent, splitChunks(tokens).map(add)),
    /** Repaints the chunks that are drawn. */
    again: () => chunks.forEach(chunk => chunk.drawn && paint(chunk.node, chunk.tokens)),
    /** Draws the chunk of a token. */
    show: token => chunks.forEach(chunk => { if (chunk.tokens[0].at <= token.at && token.at <= chunk.tokens.at(-1).at) draw(chunk); }),
    clear: () => { observer.disconnect(); chunks.clear(); },
  };
}

function splitChunks(tokens) {
  const chunks = [];
  let start = 0;
  tokens.forEach((token, index) => {
    const length = index + 1 - start;
    if (length < MAX_CHUNK_TOKENS && !(length >= CHUNK_TOKENS && token.piece?.endsWith("\n"))) return;
    chunks.push(tokens.slice(start, index + 1));
    start = index + 1;
  });
  if (start < tokens.length) chunks.push(tokens.slice(start));
  return chunks;
}
const plainText = tokens => tokens.map(token => token.piece ?? `${token.id} `).join("").replaceAll("\n", "↵\n");
