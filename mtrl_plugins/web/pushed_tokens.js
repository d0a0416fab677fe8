// The tokens of a group that training pushed up or down most, with links to them.

import { el, number, percent, signed } from "./dom.js";
import { dataTable } from "./data_table.js";
import { linkTo } from "./address.js";
import { isTrained } from "./ledger.js";

const SHOWN = 10, CONTEXT = 5; // tokens in a table, and around a token
const text = token => token.piece ?? `${token.id} `;

/** Advantage times weight times (1 − probability): how far a token's logit is pushed, before clipping and the learning rate. */
export function push(token) {
  if (token.advantage === undefined || !isTrained(token)) return 0;
  const probability = Number.isFinite(token.logprob) ? Math.exp(token.logprob) : 0;
  return token.advantage * (token.weight ?? 1) * (1 - Math.min(1, probability));
}

export function pushedTokens(run, attempts) {
  const all = attempts.flatMap(({ rollout, ledger, tokens }) => tokens.filter(push).map(token => ({ token, rollout, tokens, last: rollout.ledgers.indexOf(ledger) + 1, push: push(token) })));
  if (!all.length) return el("p", { class: "notice small" }, "No token of this group was pushed: no step trained on it, or all its advantages are 0.");
  const up = all.filter(one => one.push > 0).sort((a, b) => b.push - a.push), down = all.filter(one => one.push < 0).sort((a, b) => a.push - b.push);
  const table = (title, list) => dataTable(title, ["Token", "push", "advantage", "probability", "Attempt", "In"], list.slice(0, SHOWN).map(one => row(run, one)), { textFrom: 4 });
  return el("section", { class: "stack pushed", "aria-labelledby": "pushed" }, el("h2", { id: "pushed" }, "Tokens that were pushed most"),
    el("p", { class: "dim small" }, "Push is the advantage × the weight × (1 − the probability): the gradient at the token's logit, before clipping and the learning rate."),
    el("div", { class: "pair" }, table("Pushed up", up), table("Pushed down", down)));
}
function row(run, { token, rollout, tokens, last, push }) {
  const params = { by: "advantage", token: token.at, ledger: rollout.ledgers.length > 1 ? last : "" };
  const around = (from, to) => tokens.slice(Math.max(0, from), to).map(text).join("").replaceAll("\n", "↵");
  return [el("a", { class: "mono", href: linkTo(run.name, "rollout", rollout.row.place, params) }, `“${text(token).replaceAll("\n", "↵")}”`), signed(push), signed(token.advantage), percent(Math.exp(token.logprob)),
    `#${rollout.index}, turn ${token.entry.turn}`, el("span", { class: "mono context" }, around(token.at - CONTEXT, token.at), el("b", {}, around(token.at, token.at + 1)), around(token.at + 1, token.at + 1 + CONTEXT))];
}
