// The siblings of a group as a heat map: a row for each attempt, a column for each turn or part of the tokens.

import { $$, el, integer, number, put, signed } from "./dom.js";
import { linkTo, updateAddress } from "./address.js";
import { isTrained } from "./ledger.js";

const PARTS = 24, MAX_COLUMNS = 64, SMALLEST = 1e-6;
const QUANTITIES = { advantage: "Advantage", logprob: "Logprob", reward: "Reward" };
const COLUMNS = { turns: "Turns", parts: "Parts of the tokens" };
const chosen = { heat: "advantage", columns: "turns" }; // kept between groups
const MOVES = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };

export function heatMap(run, attempts, params) {
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
  const table = el("table", { class: "heat-grid", role: "grid", "aria-label": `${QUANTITIES[chosen.heat]} by attempt and ${COLUMNS[chosen.columns].toLowerCase()}; arrow keys move, Enter opens`, on: { keydown: move } },
    el("thead", {}, el("tr", {}, el("th", { scope: "col" }, chosen.columns === "turns" ? "Turn" : "From token"), [...Array(columns).keys()].map(index => el("th", { scope: "col", class: "number" }, head(index))))),
    el("tbody", {}, rows.map((row, index) => el("tr", {}, el("th", { scope: "row", class: "number" }, `#${attempts[index].rollout.index} `, el("span", { class: "dim" }, number(attempts[index].rollout.row.reward, 2))),
      [...Array(columns).keys()].map(at => el("td", {}, row[at] ? cellLink(run, attempts[index], row[at], most) : null))))));
  const first = table.querySelector("a");
  if (first) first.tabIndex = 0;
  return [el("div", { class: "scroll", tabindex: 0, role: "group", "aria-label": "Heat map of siblings" }, table), legend(most), cut ? el("p", { class: "dim tiny" }, `${integer(cut)} more turns are not shown.`) : null];
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
function legend(most) {
  const item = (value, text) => el("li", {}, el("i", { class: "swatch", style: { background: shade(value, most) } }), text);
  if (most === SMALLEST) return el("ul", { class: "legend" }, el("li", { class: "dim" }, "0 everywhere, or · not known"));
  return el("ul", { class: "legend" }, chosen.heat === "logprob" ? [item(0, "0"), item(-most, number(-most, 2))] : [item(-most, signed(-most)), item(0, "0"), item(most, signed(most))], el("li", { class: "dim" }, "· none: not trained, or not known"));
}

/** Arrow keys move the focus from cell to cell. */
function move(event) {
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
