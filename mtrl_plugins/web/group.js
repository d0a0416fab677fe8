// The rollouts of a group: as a heat map, by the tokens that were pushed most, and side by side where they diverge.

import { count, el, number, put, integer } from "./dom.js";
import { fetchGroup } from "./data.js";
import { paintTokens, tokenScale, ledgerTokens } from "./ledger.js";
import { tokenChunks } from "./token_chunks.js";
import { linkTo } from "./address.js";
import { conversationEntry as speech } from "./conversation.js";
import { heatMap } from "./heat_map.js";
import { pushedTokens } from "./pushed_tokens.js";

export async function view({ frame, run, address }) {
  const group = await fetchGroup(run.name, address.item);
  const attempts = group.rollouts.map(attempt => ({ rollout: attempt, ledger: attempt.ledgers.at(-1), tokens: ledgerTokens(attempt.ledgers.at(-1)) }));
  attempts.sort((a, b) => (b.rollout.row.reward ?? -Infinity) - (a.rollout.row.reward ?? -Infinity) || a.rollout.index - b.rollout.index);
  const sharedTokens = sharedPrefix(attempts.map(attempt => attempt.tokens.map(token => token.id)));
  const rewards = attempts.map(attempt => attempt.rollout.row.reward).filter(attempt => attempt !== null);
  const spread = rewards.length && Math.max(...rewards) > Math.min(...rewards);
  const first = attempts[0].rollout.row;
  const merged = mergeEqual(attempts), drawn = tokenChunks((node, list) => paintDivergence(run, node, list, sharedTokens));
  put(frame, el("header", { class: "top stack" }, el("h1", { class: "question" }, first.question || first.task),
      el("p", { class: "dim small" }, `${count(attempts.length, "attempt")} at `, el("span", { class: "mono" }, first.task), first.step === null ? "" : [" in ", el("a", { href: linkTo(run.name, "rollouts", null, { step: first.step }) }, `step ${first.step}`)],
        attempts.length < 2 ? " · there is no other to compare it with" : [` · ${integer(sharedTokens)} tokens are the same in all`, spread ? "" : rewards.length ? " · all have the same reward, so their advantages are 0" : " · none has a reward"]),
      attempts.length < 2 ? null : differences(merged)), heatMap(run, attempts, address.params), pushedTokens(run, attempts),
    el("h2", {}, "Side by side"), el("div", { class: "scroll siblings-all", tabindex: 0, role: "group", "aria-label": "Attempts" }, merged.map(attempt => column(run, attempt, sharedTokens, drawn))));
  return { title: `Group ${group.group} of ${run.name}`, leave: drawn.clear, actions: { Escape: () => history.back() } };
}

function sharedPrefix(lists) {
  let length = 0;
  while (lists.every(list => length < list.length && list[length] === lists[0][length])) length += 1;
  return lists.length > 1 ? length : 0;
}

/** Attempts with the same tokens and reward share a column. */
function mergeEqual(attempts) {
  const clusters = new Map();
  for (const attempt of attempts) {
    const key = JSON.stringify([attempt.rollout.row.reward, attempt.rollout.stop, attempt.ledger.entries.map(entry => [entry.author, entry.ids, entry.messages])]);
    if (!clusters.has(key)) clusters.set(key, { ...attempt, members: [] });
    clusters.get(key).members.push(attempt.rollout);
  }
  return [...clusters.values()];
}
const attemptNames = ({ members }) => members.map(attempt => `#${attempt.index}`).join(" ");

/** A table of the facts in which attempts differ. */
function differences(attempts) {
  const facts = { Reward: attempt => number(attempt.row.reward, 3), Ended: attempt => attempt.row.stop.replaceAll("_", " "), Answer: attempt => attempt.row.answer || "–",
    Tools: attempt => Object.entries(attempt.row.tools).map(([name, many]) => many > 1 ? `${name} ×${many}` : name).join(", ") || "none",
    Outcomes: attempt => Object.entries(attempt.row.outcomes).map(([name, many]) => `${many} ${name}`).join(", ") || "none", Turns: attempt => String(attempt.row.turns),
    Tokens: attempt => String(attempt.row.tokens), ...Object.fromEntries(Object.keys(attempts[0].rollout.rewards).map(name => [name, attempt => number(attempt.rewards[name], 3)])) };
  const differing = Object.entries(facts).filter(([name, fact], index, list) => new Set(attempts.map(({ rollout: attempt }) => fact(attempt))).size > 1 && !(Object.keys(attempts[0].rollout.rewards).length < 2 && name in attempts[0].rollout.rewards));
  if (!differing.length) return el("p", { class: "dim small" }, "They do not differ in any of these facts.");
  return el("div", { class: "scroll panel flush" }, el("table", { class: "differences" }, el("thead", {}, el("tr", {}, el("th", {}, "What differs"), attempts.map(attempt => el("th", { scope: "col" }, attemptNames(attempt))))),
    el("tbody", {}, differing.map(([name, fact]) => el("tr", {}, el("th", { scope: "row" }, name), attempts.map(({ rollout: attempt }) => el("td", { data: { success: attempt.row.success === 1 ? "yes" : attempt.row.success === 0 ? "no" : "none" } }, fact(attempt))))))));
}

function column(run, { rollout: attempt, ledger, tokens: list, members }, sharedTokens, drawn) {
  const row = attempt.row, start = ledger.entries.findLast(entry => entry.start <= sharedTokens && entry.ids?.length)?.start ?? 0;
  const shown = ledger.entries.filter(entry => entry.start >= start && (entry.ids?.length || entry.messages?.length));
  return el("article", { class: "panel attempt" },
    el("header", { class: "row between" }, el("span", { class: "row" }, members.map(other => el("a", { class: "number", href: linkTo(run.name, "rollout", other.row.place) }, `#${other.index}`)), members.length > 1 ? el("span", { class: "dim small" }, "identical") : null),
      el("span", { class: "score-summary" }, el("b", { class: "number" }, number(row.reward, 3)), el("span", { class: "chip", data: { outcome: row.success === 1 ? "ok" : row.success === 0 ? "error" : "cancelled" } }, row.stop.replaceAll("_", " ")))),
    shown.map(entry => {
      const entryTokens = list.filter(token => token.entry === entry), before = entryTokens.filter(token => token.at < sharedTokens).length;
      const marked = entry.author === "policy" && before && before < entryTokens.length ? drawn.fill(el("p", { class: "ids mono diverged" }), entryTokens) : null;
      return el("section", { class: "entry", data: { author: entry.author } }, speech(run, entry), marked);
    }));
}
/** Draws the turn in which an attempt diverges, with the shared tokens pale. */
function paintDivergence(run, node, list, sharedTokens) {
  paintTokens(run.name, node, list, "author", tokenScale(list));
  node.querySelectorAll(".t").forEach(attempt => attempt.classList.toggle("pale", Number(attempt.dataset.at) < sharedTokens));
}
