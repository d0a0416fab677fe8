// The ledger: every token by itself, coloured by what is asked of it, with its number and why it is (not) trained.

import { bytes, count, el, number, percent, put } from "./dom.js";
import { mediaOf, small } from "./medium.js";

export const MODES = [["author", "Author"], ["trained", "Trained"], ["logprob", "Logprob"], ["surprise", "Surprise"], ["advantage", "Advantage"], ["version", "Version"]];
const BITS = Math.LN2, NONE = 1e-6;

/** All tokens of a ledger, one after the other, each with what is known of it. */
export function tokens(ledger) {
  const turns = ledger.entries.filter(entry => entry.author === "policy");
  return ledger.entries.flatMap(entry => {
    const behind = turns.filter(turn => turn.start > entry.start), held = mediaOf(entry);
    let moved = entry.seen - entry.start;
    return (entry.ids ?? []).map((id, place) => {
      const over = (entry.spans ?? []).findIndex(span => span[1] === place && span[0] < place);
      if (over >= 0 && entry.widths) moved += entry.widths[over] - (entry.spans[over][1] - entry.spans[over][0]);
      const within = (entry.spans ?? []).findIndex(span => span[0] <= place && place < span[1]), at = entry.start + place, seen = at + moved;
      return { at, id, entry, piece: entry.pieces?.[place], logprob: entry.logprobs?.[place],
        advantage: entry.advantages?.[place], weight: entry.weights?.[place], version: entry.versions?.[place] ?? entry.version,
        shows: held[within], first: entry.spans?.[within]?.[0] === place, width: entry.widths?.[within],
        reused: () => behind.filter(turn => (turn.cached ?? 0) > seen).length, asked: behind.length };
    });
  });
}
export const trained = token => token.entry.trained && (token.weight === undefined || token.weight > 0);

/** How a token looks in a mode: a hue and how much of it, or nothing. */
function tint(mode, token, scale) {
  if (mode === "author") return [`var(--${token.entry.author})`, .2];
  if (mode === "trained") return trained(token) ? ["var(--ok)", .26] : null;
  if (token.entry.author !== "policy") return null;
  if (mode === "logprob") return ["var(--policy)", Math.min(1, -token.logprob / scale.logprob) * .42];
  if (mode === "surprise") return -token.logprob / BITS < 1 ? null : ["var(--invalid)", Math.min(1, -token.logprob / BITS / 8) * .46];
  if (mode === "advantage") return token.advantage ? [token.advantage > 0 ? "var(--ok)" : "var(--error)", .1 + Math.min(1, Math.abs(token.advantage) / scale.advantage) * .32] : null;
  if (mode === "version") return token.version === undefined ? null : [`var(--curve-${(token.version - scale.oldest) % 6 + 1})`, .28];
  return null;
}

export function legend(mode, all) {
  const swatch = (hue, part, text) => el("li", {}, el("i", { class: "swatch", style: { background: `color-mix(in oklab, ${hue} ${part * 100}%, var(--paper))` } }), text);
  const scale = scaled(all);
  const ramp = (hue, part, low, high) => el("li", {}, el("span", {}, low), el("i", { class: "ramp", style: { background: `linear-gradient(to right, var(--paper), color-mix(in oklab, ${hue} ${part * 100}%, var(--paper)))` } }), el("span", {}, high));
  const none = text => el("li", { class: "dim" }, text);
  const made = {
    author: () => [...new Set(all.map(one => one.entry.author))].map(author => swatch(`var(--${author})`, .2, author)),
    trained: () => [swatch("var(--ok)", .26, `trained: ${all.filter(trained).length}`), swatch("var(--paper)", 0, `not: ${all.filter(one => !trained(one)).length}`)],
    logprob: () => [ramp("var(--policy)", .42, "0", number(-scale.logprob, 3))],
    surprise: () => [ramp("var(--invalid)", .46, "under 1 bit", "8 bits")],
    advantage: () => scale.known && scale.advantage <= NONE ? [none("0 throughout: its siblings earned the same")] : scale.known ? [swatch("var(--error)", .3, `down to ${number(-scale.advantage, 3)}`), swatch("var(--ok)", .3, `up to ${number(scale.advantage, 3)}`)] : [none("nothing was learned from this one, or it was not kept")],
    version: () => [...new Set(all.map(one => one.version).filter(one => one !== undefined))].map(one => swatch(`var(--curve-${(one - scale.oldest) % 6 + 1})`, .28, `version ${one}`)),
  };
  return el("ul", { class: "legend" }, made[mode]());
}
export function scaled(all) {
  const found = { logprob: .5, known: false, advantage: NONE, oldest: Infinity };
  for (const { logprob, advantage, version } of all) {
    if (Number.isFinite(logprob)) found.logprob = Math.max(found.logprob, -logprob);
    if (advantage !== undefined) Object.assign(found, { known: true, advantage: Math.max(found.advantage, Math.abs(advantage)) });
    found.oldest = Math.min(found.oldest, version ?? Infinity);
  }
  return found;
}

/** An entry's tokens as text that can be pointed at; a medium stands where its tokens stand. */
export function paint(run, parent, all, mode, scale) {
  put(parent, all.map(token => {
    const text = token.piece ?? String(token.id), colour = tint(mode, token, scale);
    const node = el("span", { class: token.piece === undefined ? "t id" : "t", id: `t${token.at}`, data: { at: token.at, author: token.entry.author } });
    if (colour && colour[1] > .005) node.style.setProperty("background", `color-mix(in oklab, ${colour[0]} ${colour[1] * 100}%, transparent)`);
    const [lead, ...rest] = text.split("\n");
    node.append(lead, ...rest.flatMap(one => [el("span", { class: "nl", "aria-hidden": true }, "↵"), "\n", one]));
    if (!text) node.append(el("span", { class: "nl", title: "part of the character before it" }, "·"));
    if (token.shows && token.first) node.prepend(small(run, token.shows));
    return [node, token.piece === undefined ? " " : null];
  }));
}

/** Everything that is known of one token. */
export function told(token, rollout) {
  const row = (name, ...value) => el("div", {}, el("dt", {}, name), el("dd", {}, value));
  const text = token.piece === undefined ? `id ${token.id}` : `“${token.piece.replaceAll("\n", "↵")}”`;
  const policy = token.entry.author === "policy";
  return [
    el("div", { class: "row which" }, el("b", { class: "mono" }, text), el("span", { class: "dim number" }, `token ${token.at} · id ${token.id}`),
      el("span", { class: "chip", data: { author: token.entry.author } }, token.entry.author + (token.entry.turn !== undefined && policy ? `, turn ${token.entry.turn}` : ""))),
    el("dl", { class: "number" },
      policy ? row("logprob", number(token.logprob, 4)) : null,
      policy ? row("chance", percent(Math.exp(token.logprob))) : null,
      policy ? row("surprise", `${number(-token.logprob / BITS, 3)} bits`) : null,
      token.advantage !== undefined && policy ? row("advantage", number(token.advantage, 3)) : null,
      token.weight !== undefined && policy && token.weight !== 1 ? row("weight", number(token.weight, 3)) : null,
      token.version !== undefined && token.version !== null ? row("version", token.version) : null,
      token.shows ? row("stands for", `${token.shows.kind}, ${bytes(token.shows.bytes)}${token.width ? `, seen as ${count(token.width, "token")}` : ""}`) : null,
      token.asked ? row("cached", `${token.reused()} of ${token.asked} times`) : null),
    el("p", { class: "because", data: { trained: trained(token) ? "yes" : "no" } }, el("b", {}, trained(token) ? "Trained" : "Not trained"), `: ${trained(token) ? token.entry.because : token.entry.because_not ?? token.entry.because}.`),
  ];
}
