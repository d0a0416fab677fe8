// A run, or several laid over each other: how it goes, what is alarming, where the time goes, how it was made.

import { $, Refusal, clock, count, el, number, percent, put, seconds, whole } from "./dom.js";
import { alarms, file, metrics, runs as listed } from "./data.js";
import { board, dash, hue, lines, stack } from "./chart.js";
import { link } from "./place.js";

const POLL_MS = 2000, FRESH_S = 90;
const at = { hidden: new Set() }; // which runs are not shown, as long as the page is open

export async function view({ frame, runs }) {
  const kept = runs.map((run, place) => ({ run, place, lines: [], from: 0, said: [], changed: run.changed }));
  const shared = board();
  shared.span = () => {
    const steps = kept.filter(one => !at.hidden.has(one.run.name)).flatMap(one => [one.lines[0]?.step, one.lines.at(-1)?.step]).filter(step => step !== undefined);
    return steps.length ? [Math.min(...steps), Math.max(...steps, 1)] : [0, 1];
  };
  await Promise.all(kept.map(read));

  const parts = { server: el("div", { class: "unanswered", role: "status" }), facts: el("div", { class: "facts-all" }), said: el("div", { class: "stack" }), charts: el("div", { class: "charts" }), settings: el("div") };
  const tools = toolbar(shared, kept, () => fill());
  put(frame, el("h1", { class: "unseen" }, runs.length > 1 ? "Runs" : `Run ${runs[0].name}`), parts.server, parts.facts, parts.said, tools, parts.charts, parts.settings);
  const drawn = new Map();
  let timer = 0, over = false, trouble = null;
  const tell = () => put(parts.facts, kept.map(one => facts(one, kept.length > 1, trouble)));
  const fill = () => {
    const shown = kept.filter(one => !at.hidden.has(one.run.name));
    tell();
    put(parts.said, notices(kept));
    draw(parts.charts, shared, drawn, shown, kept.length > 1);
  };
  put(parts.settings, settings(runs));
  fill();
  Promise.all(kept.map(async one => { one.said = await alarms(one.run.name); })).then(() => over || put(parts.said, notices(kept)), () => {});
  /** Whether there was anything new. A page may be older than its run, which tells how it is made when it begins. */
  const look = async () => {
    const unborn = kept.filter(({ run }) => !begun(run));
    if (unborn.length) {
      const known = (await listed()).runs;
      for (const { run } of unborn) Object.assign(run, known.find(one => one.name === run.name));
      if (unborn.some(({ run }) => begun(run))) put(parts.settings, settings(runs));
    }
    const fresh = await Promise.all(kept.map(read)), missed = trouble !== null;
    for (const [place, one] of kept.entries()) if (fresh[place] || missed) one.said = await alarms(one.run.name);
    return missed || fresh.some(Boolean);
  };
  const again = async () => {
    if (!document.hidden && !file) {
      let fresh = false;
      try { fresh = await look(); trouble = null; } catch (error) { if (!(error instanceof Refusal)) throw error; trouble = error; }
      if (over) return;
      put(parts.server, trouble && el("p", { class: "notice small" }, `${trouble.message} ${trouble.remedy}`));
      fresh ? fill() : tell();
    }
    timer = setTimeout(again, POLL_MS);
  };
  timer = setTimeout(again, POLL_MS);
  requestAnimationFrame(() => shared.draw());
  return { title: runs.map(run => run.name).join(", "), leave: () => { over = true; clearTimeout(timer); shared.close(); },
    acts: { Escape: () => shared.zoom ? shared.focus(null) : false } };
}

const begun = run => Object.keys(run.settings).length > 0;

/** Reads on from where it left off; whether there was anything new. */
async function read(one) {
  const found = await metrics(one.run.name, one.from);
  if (found.again) one.lines = [];
  one.lines = one.lines.concat(found.lines);
  one.from = found.at;
  one.changed = found.changed ?? one.changed;
  return found.again || found.lines.length > 0;
}

function latest(one, name) {
  for (let place = one.lines.length - 1; place >= 0; place -= 1) {
    const value = one.lines[place][name];
    if (value !== undefined && value !== null) return [value, one.lines[place].step];
  }
  return [null, null];
}

function facts(one, many, trouble) {
  const step = one.lines.at(-1)?.step ?? 0, all = one.run.steps;
  const age = one.changed ? Date.now() / 1000 - one.changed : null;
  const over = all && step >= all, live = !over && !trouble && !file && age !== null && age < FRESH_S;
  const state = !one.lines.length ? "nothing measured yet" : over ? "finished" : trouble ? "no answer" : live ? "running" : file ? "as it was" : `silent since ${clock(one.changed)}`;
  const spent = one.lines.reduce((sum, line) => sum + Object.entries(line).filter(([name]) => /^time\/[^/]+_s$/.test(name)).reduce((all, [, value]) => all + (value ?? 0), 0), 0);
  const [reward] = latest(one, "reward/mean"), [sampled] = latest(one, "success/sampled"), [greedy, when] = latest(one, "eval/greedy");
  const fact = (label, value, more) => el("div", { class: "fact" }, el("dt", { class: "label" }, label), el("dd", {}, el("b", { class: "number" }, value), more ? el("span", { class: "dim small" }, " ", more) : null));
  return el("section", { class: "facts", "aria-label": one.run.name },
    el("div", { class: "who" }, many ? el("span", { class: "swatch", style: { background: hue(one.place) } }) : null,
      el("a", { class: "runname", href: link(one.run.name, "rollouts") }, one.run.name),
      el("span", { class: "chip", data: { state: over ? "over" : live ? "live" : "still" } }, state)),
    el("dl", {}, fact("Step", whole(step), all ? `of ${whole(all)}` : ""),
      fact("Reward", reward === null ? "–" : number(reward, 3)),
      fact("Sampled", percent(sampled)),
      fact("Greedy", percent(greedy), when === null ? "" : when ? `after ${when}` : "before"),
      fact("Time", seconds(spent), step ? `${seconds(spent / Math.max(1, step))} a step` : "")));
}

function notices(kept) {
  const said = kept.flatMap(one => one.said.map(told => ({ ...told, one })));
  if (!said.length) return null;
  const show = told => el("li", { class: "notice alarm" },
    el("p", {}, kept.length > 1 ? `${told.one.run.name}, ` : "", el("a", { href: link(told.one.run.name, "rollouts", null, { step: told.step }) }, `step ${told.step}`), ": ", coded(told.seen)),
    told.likely ? el("p", { class: "dim small" }, coded(told.likely)) : null,
    told.remedy ? el("p", { class: "small remedy" }, coded(told.remedy)) : null);
  const coded = words => words.split("`").map((part, place) => place % 2 ? el("code", {}, part) : part);
  const last = said.slice(-2).reverse(), rest = said.slice(0, -2).reverse();
  return el("section", { class: "stack", "aria-label": "Alarms" }, el("ul", { class: "alarms" }, last.map(show)),
    rest.length ? el("details", {}, el("summary", {}, `${count(rest.length, "earlier alarm")}`), el("ul", { class: "alarms" }, rest.map(show))) : null);
}

function toolbar(shared, kept, fill) {
  const reset = el("button", { class: "quiet", hidden: true, on: { click: () => shared.focus(null) } }, "Whole run");
  shared.changed = () => { reset.hidden = !shared.zoom; };
  const slider = el("input", { type: "range", id: "smooth", min: 0, max: 1, step: .05, value: shared.smooth,
    on: { input: event => { shared.smooth = Number(event.target.value); shared.draw(); } } });
  const toggles = kept.length > 1 ? kept.map(one => el("label", { class: "toggle" },
    el("input", { type: "checkbox", checked: !at.hidden.has(one.run.name), on: { change: event => {
      event.target.checked ? at.hidden.delete(one.run.name) : at.hidden.add(one.run.name); fill(); } } }),
    el("span", { class: "swatch", style: { background: hue(one.place) } }), one.run.name)) : null;
  return el("div", { class: "row centre toolbar" }, toggles, el("span", { class: "grow" }), reset,
    el("label", { class: "row centre", for: "smooth" }, el("span", { class: "label" }, "Smoothing"), slider),
    el("span", { class: "label hint" }, "drag, or ⇧ ← → and Enter, to zoom"));
}

function draw(parent, shared, drawn, shown, many) {
  const nodes = [];
  for (const chart of shown[0]?.run.charts ?? []) {
    // Laid over each other, runs have a hue each, and with the dashes those of one hue are told apart as well.
    const curves = shown.flatMap(one => named(chart, one).map(([metric, name], place, all) => ({
      name: many ? `${one.run.name} ${name}` : name, hue: hue(many ? one.place : place), dash: dash(many ? (place + all.length * Math.floor(one.place / 6)) % 6 : place),
      sparse: metric.startsWith("eval/"), points: one.lines.filter(line => line[metric] !== undefined && line[metric] !== null).map(line => [line.step, line[metric]]) })))
      .filter(curve => curve.points.length);
    if (curves.length) nodes.push(place(drawn, chart.title, () => lines(shared, chart), curves));
  }
  for (const one of shown) {
    const layers = phases(one);
    if (layers.length) nodes.push(place(drawn, many ? `Time, ${one.run.name}` : "Time", title => stack(shared, { title, unit: "seconds a step" }), layers, "wide"));
  }
  function place(kept, title, make, values, also) {
    let one = kept.get(title);
    if (!one) { kept.set(title, one = make(title)); shared.add(one); }
    if (also) one.node.classList.add(also);
    return [one, values];
  }
  const wanted = nodes.map(([one]) => one.node);
  if (wanted.length !== parent.children.length || wanted.some((node, at) => node !== parent.children[at])) put(parent, wanted);
  if (!wanted.length) put(parent, el("div", { class: "panel empty wide" }, el("h2", {}, "Nothing is measured yet"), el("p", {}, "Curves appear here as soon as the first step is over.")));
  for (const [one, values] of nodes) one.set(values);
}
function named(chart, one) {
  const known = Object.entries(chart.names ?? {});
  if (!chart.within) return known;
  const inside = new Set(one.lines.flatMap(line => Object.keys(line).filter(name => name.startsWith(chart.within) && !(chart.without ?? []).includes(name))));
  const more = [...inside].sort().map(name => [name, name.slice(chart.within.length)]);
  return [...known, ...(known.length && more.length < 2 ? [] : more)];
}
function phases(one) {
  const steps = one.lines.filter(line => line.step > 0), sums = {};
  for (const line of steps) for (const [name, value] of Object.entries(line)) if (/^time\/[^/]+_s$/.test(name)) sums[name] = (sums[name] ?? 0) + value;
  return Object.entries(sums).sort((a, b) => b[1] - a[1]).map(([name]) => ({ name: name.slice(5, -2).replaceAll("_", " "), points: steps.map(line => [line.step, line[name] ?? 0]) }));
}

function settings(runs) {
  const all = runs.map(run => ({ ...run.settings, engine: run.engine, ...Object.fromEntries(Object.entries(run.versions).map(([name, value]) => [`versions.${name}`, value])) }));
  const names = [...new Set(all.flatMap(Object.keys))].sort();
  if (!names.length) return null;
  const differs = name => new Set(all.map(one => JSON.stringify(one[name]))).size > 1;
  const apart = names.filter(differs);
  const body = el("tbody");
  const search = el("input", { type: "search", placeholder: "Find a setting", "aria-label": "Find a setting", on: { input: () => fill() } });
  const only = el("input", { type: "checkbox", checked: runs.length > 1, on: { change: () => fill() } });
  const shown = value => value === undefined ? "–" : typeof value === "string" ? value || "“”" : JSON.stringify(value);
  const fill = () => {
    const words = search.value.trim().toLowerCase();
    const listed = names.filter(name => (runs.length < 2 || !only.checked || differs(name)) && (!words || name.toLowerCase().includes(words) || all.some(one => shown(one[name]).toLowerCase().includes(words))));
    put(body, listed.length ? listed.map(name => el("tr", { class: differs(name) ? "differs" : null }, el("th", { scope: "row", class: "mono" }, name), all.map(one => el("td", { class: "mono" }, shown(one[name])))))
      : el("tr", {}, el("td", { colspan: 9, class: "dim" }, words ? "No such setting." : "Made with the same settings.")));
  };
  fill();
  return el("details", { class: "panel settings", open: runs.length > 1 }, el("summary", {}, el("h2", {}, "Settings"), el("span", { class: "dim small" }, runs.length > 1 ? `${count(apart.length, "difference")} among ${names.length}` : `${names.length}`)),
    el("div", { class: "row centre" }, el("div", { class: "grow" }, search), runs.length > 1 ? el("label", { class: "toggle" }, only, "only what differs") : null),
    el("div", { class: "scroll" }, el("table", {}, el("thead", {}, el("tr", {}, el("th", { scope: "col" }, "Setting"), runs.map(run => el("th", { scope: "col" }, run.name)))), body)));
}
