// Siblings side by side: what they share is said once, and where they part is where each column begins.

import { el, number, percent, put, whole } from "./dom.js";
import { group } from "./data.js";
import { paint, scaled, tokens, trained } from "./ledger.js";
import { pieces } from "./pieces.js";
import { link } from "./place.js";
import { entry as speech } from "./speech.js";

export async function view({ frame, run, here }) {
  const found = await group(run.name, here.which);
  const all = found.rollouts.map(one => ({ one, ledger: one.ledgers.at(-1), tokens: tokens(one.ledgers.at(-1)) }));
  all.sort((a, b) => (b.one.row.reward ?? -Infinity) - (a.one.row.reward ?? -Infinity) || a.one.index - b.one.index);
  const same = shared(all.map(one => one.tokens.map(token => token.id)));
  const rewards = all.map(one => one.one.row.reward).filter(one => one !== null);
  const spread = rewards.length && Math.max(...rewards) > Math.min(...rewards);
  const first = all[0].one.row;
  const alike = clusters(all), drawn = pieces((node, list) => parted(run, node, list, same));
  put(frame, el("header", { class: "top stack" }, el("h1", { class: "asked" }, first.question || first.task),
      el("p", { class: "dim small" }, `${all.length} attempts at `, el("span", { class: "mono" }, first.task), first.step === null ? "" : [" in ", el("a", { href: link(run.name, "rollouts", null, { step: first.step }) }, `step ${first.step}`)],
        ` · ${whole(same)} tokens are the same in all`, spread ? "" : " · all earned the same, so nothing is learned from them"), differences(alike)),
    el("div", { class: "scroll siblings-all", tabindex: 0, role: "group", "aria-label": "Attempts" }, alike.map(one => column(run, one, same, drawn))));
  return { title: `Group ${found.group} of ${run.name}`, leave: drawn.clear, acts: { Escape: () => history.back() } };
}

function shared(lists) {
  let at = 0;
  while (lists.every(list => at < list.length && list[at] === lists[0][at])) at += 1;
  return lists.length > 1 ? at : 0;
}

/** Those that wrote the same, and earned the same, are one column. */
function clusters(all) {
  const found = new Map();
  for (const one of all) {
    const key = JSON.stringify([one.one.row.reward, one.one.stop, one.ledger.entries.map(entry => [entry.author, entry.ids, entry.messages])]);
    if (!found.has(key)) found.set(key, { ...one, many: [] });
    found.get(key).many.push(one.one);
  }
  return [...found.values()];
}
const called = ({ many }) => many.map(one => `#${one.index}`).join(" ");

/** The facts in which they differ, those that say most first. */
function differences(all) {
  const facts = { Reward: one => number(one.row.reward, 3), Ended: one => one.row.stop.replaceAll("_", " "), Answer: one => one.row.answer || "–",
    Tools: one => Object.entries(one.row.tools).map(([name, many]) => many > 1 ? `${name} ×${many}` : name).join(", ") || "none",
    Outcomes: one => Object.entries(one.row.outcomes).map(([name, many]) => `${many} ${name}`).join(", ") || "none", Turns: one => String(one.row.turns),
    Tokens: one => String(one.row.tokens), ...Object.fromEntries(Object.keys(all[0].one.rewards).map(name => [name, one => number(one.rewards[name], 3)])) };
  const apart = Object.entries(facts).filter(([name, fact], place, list) => new Set(all.map(({ one }) => fact(one))).size > 1 && !(Object.keys(all[0].one.rewards).length < 2 && name in all[0].one.rewards));
  if (!apart.length) return el("p", { class: "dim small" }, "They do not differ in any fact.");
  return el("div", { class: "scroll panel flush" }, el("table", { class: "apart" }, el("thead", {}, el("tr", {}, el("th", {}, "What differs"), all.map(one => el("th", { scope: "col" }, called(one))))),
    el("tbody", {}, apart.map(([name, fact]) => el("tr", {}, el("th", { scope: "row" }, name), all.map(({ one }) => el("td", { data: { success: one.row.success === 1 ? "yes" : one.row.success === 0 ? "no" : "none" } }, fact(one))))))));
}

function column(run, { one, ledger, tokens: list, many }, same, drawn) {
  const row = one.row, start = ledger.entries.findLast(entry => entry.start <= same && entry.ids?.length)?.start ?? 0;
  const shown = ledger.entries.filter(entry => entry.start >= start && (entry.ids?.length || entry.messages?.length));
  return el("article", { class: "panel attempt" },
    el("header", { class: "row between" }, el("span", { class: "row" }, many.map(other => el("a", { class: "number", href: link(run.name, "rollout", other.row.place) }, `#${other.index}`)), many.length > 1 ? el("span", { class: "dim small" }, "wrote the same") : null),
      el("span", { class: "worth" }, el("b", { class: "number" }, number(row.reward, 3)), el("span", { class: "chip", data: { outcome: row.success === 1 ? "ok" : row.success === 0 ? "error" : "cancelled" } }, row.stop.replaceAll("_", " ")))),
    shown.map(entry => {
      const mine = list.filter(token => token.entry === entry), before = mine.filter(token => token.at < same).length;
      const marked = entry.author === "policy" && before && before < mine.length ? drawn.fill(el("p", { class: "ids mono parted" }), mine) : null;
      return el("section", { class: "entry", data: { author: entry.author } }, speech(run, entry), marked);
    }));
}
/** The turn in which an attempt goes its own way, token by token: pale as far as all went together. */
function parted(run, node, list, same) {
  paint(run.name, node, list, "author", scaled(list));
  node.querySelectorAll(".t").forEach(one => one.classList.toggle("pale", Number(one.dataset.at) < same));
}
