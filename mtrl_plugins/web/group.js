// The rollouts of a group: as a heat map with a row for each attempt and a column for each turn or part of the tokens,
// by the tokens that training pushed most, and side by side where they diverge.

import { count, el, number, put, integer, $$, signed, percent } from "./dom.js";
import { conversationEntry as speech } from "./conversation.js";
import { fetchGroup, linkTo, updateAddress } from "./data.js";
import { dataTable } from "./data_table.js";
import { paintTokens, tokenScale, ledgerTokens, tokenChunks, isTrained } from "./ledger.js";

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

const PARTS = 24, MAX_COLUMNS = 64, SMALLEST = 1e-6;
const QUANTITIES = { advantage: "Advantage", logprob: "Logprob", reward: "Reward" };
const COLUMNS = { turns: "Turns", parts: "Parts of the tokens" };
const chosen = { heat: "advantage", columns: "turns" }; // kept between groups
const MOVES = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };

function heatMap(run, attempts, params) {
  if (params.heat in QUANTITIES) chosen.heat = params.heat;
  if (params.columns in COLUMNS) chosen.columns = params.columns;
  const holder = el("div");
  const choice = (name, label, options) => el("label", { class: "row centre" }, el("span", { class: "label" }, label),
    el("select", { name, on: { change: event => { chosen[name] = event.target.value; updateAddress({ [name]: event.target.value }); draw(); } } },
      Object.entries(options).map(([value, text]) => el("option", { value, selected: chosen[name] === value }, text))));
  const draw = () => put(holder, grid(run, attempts));
  draw();
  return el("section", { class: "panel stack heat", "aria-labelledby": "heat-title" },
    el("div", { class: "row between centre" }, el("h2", { id: "heat-title" }, "Siblings"), el("div", { class: "row centre" }, choice("heat", "Colour", QUANTITIES), choice("columns", "Columns", COLUMNS))), holder);
}

function grid(run, attempts) {
  const rows = attempts.map(attempt => (chosen.columns === "turns" ? turnCells(attempt) : partCells(attempt, partSize(attempts))).map(cell => ({ ...cell, value: quantity(cell) })));
  if (!rows.some(row => row.length)) return el("p", { class: "dim small" }, "The policy wrote nothing.");
  const columns = Math.min(MAX_COLUMNS, Math.max(...rows.map(row => row.length))), cut = Math.max(...rows.map(row => row.length)) - columns;
  const most = Math.max(SMALLEST, ...rows.flat().map(cell => Math.abs(cell.value ?? 0)));
  const head = index => chosen.columns === "turns" ? String(index) : integer(index * partSize(attempts));
  const table = el("table", { class: "heat-grid", role: "grid", "aria-label": `${QUANTITIES[chosen.heat]} by attempt and ${COLUMNS[chosen.columns].toLowerCase()}; arrow keys move, Enter opens`, on: { keydown: moveCell } },
    el("thead", {}, el("tr", {}, el("th", { scope: "col" }, chosen.columns === "turns" ? "Turn" : "From token"), [...Array(columns).keys()].map(index => el("th", { scope: "col", class: "number" }, head(index))))),
    el("tbody", {}, rows.map((row, index) => el("tr", {}, el("th", { scope: "row", class: "number" }, `#${attempts[index].rollout.index} `, el("span", { class: "dim" }, number(attempts[index].rollout.row.reward, 2))),
      [...Array(columns).keys()].map(at => el("td", {}, row[at] ? cellLink(run, attempts[index], row[at], most) : null))))));
  const first = table.querySelector("a");
  if (first) first.tabIndex = 0;
  return [el("div", { class: "scroll", tabindex: 0, role: "group", "aria-label": "Heat map of siblings" }, table), heatLegend(most), cut ? el("p", { class: "dim tiny" }, `${integer(cut)} more turns are not shown.`) : null];
}

/** The turns of an attempt, each with the rewards that followed it. */
function turnCells({ ledger, tokens }) {
  const cells = [];
  for (const entry of ledger.entries) {
    if (entry.author === "policy") cells.push({ name: `turn ${entry.turn}`, params: { turn: entry.turn }, tokens: tokens.filter(token => token.entry === entry), rewards: [] });
    if (entry.reward !== undefined && entry.reward !== null) cells.at(-1)?.rewards.push(entry.reward);
  }
  return cells;
}
const partSize = attempts => Math.max(1, Math.ceil(Math.max(...attempts.map(({ tokens }) => tokens.length)) / PARTS));
function partCells({ ledger, tokens }, size) {
  const cells = [];
  for (let start = 0; start < tokens.length; start += size) {
    const inside = tokens.slice(start, start + size), end = start + size < tokens.length ? start + size : Infinity;
    cells.push({ name: `tokens ${start} to ${start + inside.length - 1}`, params: { token: start }, tokens: inside.filter(token => token.entry.author === "policy"),
      rewards: ledger.entries.filter(entry => entry.start >= start && entry.start < end && entry.reward !== undefined && entry.reward !== null).map(entry => entry.reward) });
  }
  return cells;
}
const mean = values => values.length ? values.reduce((sum, value) => sum + value, 0) / values.length : null;
function quantity({ tokens, rewards }) {
  if (chosen.heat === "reward") return rewards.length ? rewards.reduce((sum, value) => sum + value, 0) : null;
  if (chosen.heat === "logprob") return mean(tokens.map(token => token.logprob).filter(Number.isFinite));
  return mean(tokens.filter(token => token.advantage !== undefined && isTrained(token)).map(token => token.advantage * (token.weight ?? 1)));
}

function hueOf(value) { return chosen.heat === "logprob" ? "var(--policy)" : value < 0 ? "var(--error)" : "var(--ok)"; }
const shade = (value, most) => `color-mix(in oklab, ${hueOf(value)} ${Math.round(Math.abs(value) / most * 40)}%, var(--paper))`;
function cellLink(run, { rollout }, { name, params, tokens, value }, most) {
  const shown = value === null ? "·" : chosen.heat === "logprob" ? number(value, 2) : signed(value);
  return el("a", { tabindex: -1, class: "number", href: linkTo(run.name, "rollout", rollout.row.place, { by: chosen.heat === "reward" ? "" : chosen.heat, ...params }), style: value === null ? {} : { background: shade(value, most) },
    "aria-label": `attempt ${rollout.index}, ${name}: ${value === null ? `no ${chosen.heat}` : `${chosen.heat} ${shown}`}, ${tokens.length} tokens of the policy` }, shown);
}
function heatLegend(most) {
  const item = (value, text) => el("li", {}, el("i", { class: "swatch", style: { background: shade(value, most) } }), text);
  if (most === SMALLEST) return el("ul", { class: "legend" }, el("li", { class: "dim" }, "0 everywhere, or · not known"));
  return el("ul", { class: "legend" }, chosen.heat === "logprob" ? [item(0, "0"), item(-most, number(-most, 2))] : [item(-most, signed(-most)), item(0, "0"), item(most, signed(most))], el("li", { class: "dim" }, "· none: not trained, or not known"));
}

/** Arrow keys move the focus from cell to cell. */
function moveCell(event) {
  const step = MOVES[event.key], cell = event.target.closest("td");
  if (!step || !cell) return;
  event.preventDefault();
  const rows = $$("tbody tr", event.currentTarget), row = rows[rows.indexOf(cell.parentElement) + step[0]];
  const next = row?.children[cell.cellIndex + step[1]]?.querySelector("a");
  if (!next) return;
  $$("a[tabindex='0']", event.currentTarget).forEach(link => { link.tabIndex = -1; });
  next.tabIndex = 0;
  next.focus();
}

const SHOWN = 10, CONTEXT = 5; // tokens in a table, and around a token
const pieceOf = token => token.piece ?? `${token.id} `;

/** Advantage times weight times (1 − probability): how far a token's logit is pushed, before clipping and the learning rate. */
function push(token) {
  if (token.advantage === undefined || !isTrained(token)) return 0;
  const probability = Number.isFinite(token.logprob) ? Math.exp(token.logprob) : 0;
  return token.advantage * (token.weight ?? 1) * (1 - Math.min(1, probability));
}

function pushedTokens(run, attempts) {
  const all = attempts.flatMap(({ rollout, ledger, tokens }) => tokens.filter(push).map(token => ({ token, rollout, tokens, last: rollout.ledgers.indexOf(ledger) + 1, push: push(token) })));
  if (!all.length) return el("p", { class: "notice small" }, "No token of this group was pushed: no step trained on it, or all its advantages are 0.");
  const up = all.filter(one => one.push > 0).sort((a, b) => b.push - a.push), down = all.filter(one => one.push < 0).sort((a, b) => a.push - b.push);
  const table = (title, list) => dataTable(title, ["Token", "push", "advantage", "probability", "Attempt", "In"], list.slice(0, SHOWN).map(one => pushedRow(run, one)), { textFrom: 4 });
  return el("section", { class: "stack pushed", "aria-labelledby": "pushed" }, el("h2", { id: "pushed" }, "Tokens that were pushed most"),
    el("p", { class: "dim small" }, "Push is the advantage × the weight × (1 − the probability): the gradient at the token's logit, before clipping and the learning rate."),
    el("div", { class: "pair" }, table("Pushed up", up), table("Pushed down", down)));
}
function pushedRow(run, { token, rollout, tokens, last, push }) {
  const params = { by: "advantage", token: token.at, ledger: rollout.ledgers.length > 1 ? last : "" };
  const around = (from, to) => tokens.slice(Math.max(0, from), to).map(pieceOf).join("").replaceAll("\n", "↵");
  return [el("a", { class: "mono", href: linkTo(run.name, "rollout", rollout.row.place, params) }, `“${pieceOf(token).replaceAll("\n", "↵")}”`), signed(push), signed(token.advantage), percent(Math.exp(token.logprob)),
    `#${rollout.index}, turn ${token.entry.turn}`, el("span", { class: "mono context" }, around(token.at - CONTEXT, token.at), el("b", {}, around(token.at, token.at + 1)), around(token.at + 1, token.at + 1 + CONTEXT))];
}
