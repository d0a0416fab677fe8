// What changed between two steps: reward, kinds of task, endings, tools, outcomes and lengths, with links to rollouts.

import { count, el, integer, number, percent, put, seconds, signed } from "./dom.js";
import { fetchSteps, linkTo } from "./data.js";
import { histogram } from "./chart.js";
import { dataTable } from "./data_table.js";

const PROPERTIES = { kind: "Kinds of task", source: "Data sources", stop: "Endings", tool: "Tools used", outcome: "Outcomes of tool calls", blame: "Failures" };
const HEADS = { kind: "Kind", source: "Source", stop: "Ending", tool: "Tool", outcome: "Outcome", blame: "Failure of" };
const DIVIDES = ["kind", "source", "stop"]; // a rollout has one value of these, so that the change of the mean is the sum of their parts
const MEASURES = [["reward", "Reward", number], ["turns", "Turns", number], ["calls", "Tool calls", number], ["tokens", "Tokens", number], ["written", "Tokens of the policy", number], ["seconds", "Time of a rollout", seconds]];
const MAX_CAUSES = 5;

export async function view({ frame, run, address }) {
  const [first, last] = parseSteps(address.item);
  const digests = await Promise.all([first, last].map(async step => (await fetchSteps(run.name, step)) ?? null));
  put(frame, el("header", { class: "top stack" }, el("h1", { class: "question" }, `What changed from step ${first} to step ${last}`), stepForm(run, first, last)),
    digests.every(Boolean) ? comparison(run, ...digests)
      : el("div", { class: "panel empty", role: "status" }, el("p", {}, `No rollout of step ${digests[0] ? last : first} is in this run, or it is not listed yet.`)));
  const go = direction => first + direction < 0 ? false : (location.hash = linkTo(run.name, "compare", `${first + direction}-${last + direction}`));
  return { title: `Steps ${first} and ${last} of ${run.name}`, actions: { j: () => go(1), k: () => go(-1), Escape: () => history.back() } };
}
function parseSteps(text) {
  const match = /^(\d{1,9})-(\d{1,9})$/.exec(text ?? "");
  if (!match) throw new Error("Two steps are compared, such as 6-7 at the end of the address.");
  return [Number(match[1]), Number(match[2])];
}
function stepForm(run, first, last) {
  const field = (id, label, value) => el("label", { class: "row centre", for: id }, el("span", { class: "label" }, label), el("input", { id, type: "number", min: 0, max: 999999999, value, class: "step-field" }));
  const [from, to] = [field("from-step", "From step", first), field("to-step", "to step", last)];
  const show = event => { event.preventDefault(); const values = [from, to].map(label => label.querySelector("input").value); if (values.every(value => /^\d+$/.test(value))) location.hash = linkTo(run.name, "compare", values.join("-")); };
  return el("form", { class: "row centre", on: { submit: show } }, from, to, el("button", { type: "submit" }, "Compare"),
    [first, last].map(step => el("a", { class: "small", href: linkTo(run.name, "rollouts", null, { step }) }, `rollouts of step ${step}`)));
}

function comparison(run, before, after) {
  const causes = rewardCauses(before, after);
  return [el("section", { class: "panel stack", "aria-labelledby": "causes" }, el("h2", { id: "causes" }, headline(before, after)),
      el("p", { class: "dim small" }, `${scoredOf(before)}, then ${scoredOf(after)}. Success ${percent(before.success)}, then ${percent(after.success)}.`),
      causes.length ? el("ol", { class: "causes" }, causes.map(cause => causeItem(run, before, after, cause))) : el("p", { class: "dim" }, "No kind, source or ending stands out.")),
    Object.entries(PROPERTIES).map(([property, title]) => propertyTable(run, before, after, property, title)),
    measureTable(before, after), toolTable(run, before, after)];
}
const scoredOf = digest => `${integer(digest.scored)} of ${count(digest.rollouts, "rollout")} scored in step ${digest.step}`;
function headline(before, after) {
  if (before.reward === null || after.reward === null) return "Not both steps have a reward";
  const change = after.reward - before.reward, fixed = fixedTo(change);
  return Math.abs(change) < 5e-4 ? `The reward is the same: ${number(after.reward)}` : `The reward ${change < 0 ? "fell" : "rose"} by ${fixed(Math.abs(change))}, from ${fixed(before.reward)} to ${fixed(after.reward)}`;
}
/** Writes numbers with the decimals that give the whole change three digits, so that the parts shown add up to it but for the last. */
function fixedTo(change) {
  const decimals = Math.min(6, Math.max(0, 2 - Math.floor(Math.log10(Math.max(Math.abs(change), 1e-3)))));
  return value => value.toFixed(decimals);
}
/** A part of the change, with its sign. */
function partOf(before, after, part) {
  if (part === null) return "–";
  const shown = fixedTo(after.reward - before.reward)(Math.abs(part));
  return `${Number(shown) === 0 ? "±" : part < 0 ? "−" : "+"}${shown}`;
}

/** The values of a property in two steps; `part` is their part of the change of the mean reward, of which all make the whole. */
export function propertyRows(before, after, property) {
  const names = [...new Set([before, after].flatMap(digest => Object.keys(digest.values[property])))];
  const value = (digest, name) => digest.values[property][name] ?? { rollouts: 0, scored: 0, reward: null };
  const rows = names.map(name => ({ name, before: value(before, name), after: value(after, name) }));
  if (DIVIDES.includes(property)) for (const side of ["before", "after"]) addRest(rows, side, side === "before" ? before : after);
  const divides = DIVIDES.includes(property) && before.reward !== null && after.reward !== null;
  const weight = (side, digest) => side.scored ? side.scored / digest.scored * (side.reward - before.reward) : 0;
  for (const row of rows) row.part = divides ? weight(row.after, after) - weight(row.before, before) : null;
  return rows;
}
/** Adds a row for the rollouts that have none of the listed values. */
function addRest(rows, side, digest) {
  const listed = rows.filter(row => row.name !== null), sum = of => listed.reduce((total, row) => total + of(row[side]), 0);
  const rollouts = digest.rollouts - sum(value => value.rollouts), scored = digest.scored - sum(value => value.scored);
  if (rollouts <= 0) return;
  let rest = rows.find(row => row.name === null);
  if (!rest) rows.push(rest = { name: null, before: { rollouts: 0, scored: 0, reward: null }, after: { rollouts: 0, scored: 0, reward: null } });
  rest[side] = { rollouts, scored, reward: scored > 0 ? (digest.reward * digest.scored - sum(value => (value.reward ?? 0) * value.scored)) / scored : null };
}
function rewardCauses(before, after) {
  const all = DIVIDES.flatMap(property => { const rows = propertyRows(before, after, property); return rows.length < 2 ? [] : rows.map(row => ({ property, ...row })); });
  const parts = all.filter(row => row.part !== null && row.name !== null && Math.abs(row.part) >= 5e-4);
  return parts.sort((a, b) => Math.abs(b.part) - Math.abs(a.part)).slice(0, MAX_CAUSES);
}
function causeItem(run, before, after, { property, name, part, ...row }) {
  const side = (digest, value) => [integer(value.rollouts), " rollouts with reward ", number(value.reward), example(run, digest, value)];
  return el("li", { class: "row" }, el("b", { class: "number" }, partOf(before, after, part)), el("span", {}, el("span", { class: "dim" }, `${PROPERTIES[property]}: `), named(run, after, property, name)),
    el("span", { class: "dim small" }, side(before, row.before), ", then ", side(after, row.after)));
}
const named = (run, digest, property, name) => name === null ? el("span", { class: "dim" }, "none of these") : el("a", { href: linkTo(run.name, "rollouts", null, { step: digest.step, [property]: name }) }, property === "stop" ? name.replaceAll("_", " ") : name);
const example = (run, digest, value) => value.place === undefined ? null : [" ", el("a", { class: "tiny number", href: linkTo(run.name, "rollout", value.place), "aria-label": `an example of step ${digest.step}: rollout ${value.place}`, title: "an example: the one with the least reward" }, `#${value.place}`)];

function propertyTable(run, before, after, property, title) {
  const rows = propertyRows(before, after, property).sort((a, b) => Math.abs(b.part ?? 0) - Math.abs(a.part ?? 0) || b.after.rollouts + b.before.rollouts - a.after.rollouts - a.before.rollouts);
  if (!rows.some(row => row.name !== null)) return null;
  const share = (digest, value) => value.rollouts / digest.rollouts, divides = rows.some(row => row.part !== null);
  const side = (digest, value) => [[integer(value.rollouts), example(run, digest, value)], percent(share(digest, value)), number(value.reward)];
  const heads = [HEADS[property], ...[before, after].flatMap(({ step }) => [`step ${step}`, "share", "reward"]), "share changed by", divides ? "part of the reward's change" : null];
  return dataTable(title, heads.filter(Boolean), rows.map(row => [named(run, after, property, row.name), ...side(before, row.before), ...side(after, row.after),
    `${signed((share(after, row.after) - share(before, row.before)) * 100)} points`, ...(divides ? [partOf(before, after, row.part)] : [])]));
}
function measureTable(before, after) {
  const spread = (digest, name, format) => digest.spreads[name] ? [histogram(digest.spreads[name], format), format(digest[name])] : format(digest[name]);
  const changed = name => name !== "reward" && before[name] ? `${signed((after[name] - before[name]) / before[name] * 100)} %` : signed(after[name] - before[name]);
  return dataTable("Reward, lengths and times", ["Of a rollout: mean, and how it spreads", `step ${before.step}`, `step ${after.step}`, "changed by"], MEASURES.filter(([name]) => before[name] !== null && after[name] !== null).map(([name, title, format]) =>
    [title, spread(before, name, format), spread(after, name, format), changed(name)]));
}
function toolTable(run, before, after) {
  const tools = [...new Set([before, after].flatMap(digest => Object.keys(digest.tools)))];
  if (!tools.length) return null;
  const side = digest => tool => tool ? [integer(tool.calls), seconds(tool.times.p50), tool.slowest === null ? "–" : el("a", { href: linkTo(run.name, "rollout", tool.slowest) }, seconds(tool.times.p95)), outcomes(tool)] : ["0", "–", "–", ""];
  return dataTable("Tool calls", ["Tool", ...[before, after].flatMap(({ step }) => [`step ${step}`, "p50", "p95", "outcomes"])], tools.map(name =>
    [el("a", { href: linkTo(run.name, "rollouts", null, { tool: name }) }, name), ...side(before)(before.tools[name]), ...side(after)(after.tools[name])]));
}
const outcomes = tool => Object.entries(tool.outcomes).map(([name, times]) => `${integer(times)} ${name}`).join(", ");
