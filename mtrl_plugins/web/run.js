// One or several runs: facts, what they are doing now, alarms, charts of metrics and time with their values, and settings.

import { $, Refusal, clock, count, el, keepFocus, number, percent, put, seconds, integer } from "./dom.js";
import { chartGroup, dashOf, colourOf, lineChart, looksOf, stackedChart } from "./chart.js";
import { AXES, axis, isPhase, secondsOf } from "./axis.js";
import { fetchAlarms, fetchMetrics, fetchRuns as listed, linkTo } from "./data.js";
import { dataTable } from "./data_table.js";
import { notesPanel } from "./notes.js";

const POLL_MS = 2000, FRESH_S = 90, MANY = 12;
const hiddenRuns = { hidden: new Set() }; // names of runs that are switched off

export async function view({ frame, runs }) {
  const histories = runs.map((run, index) => ({ run, place: index, lines: [], from: 0, alarms: [], changed: run.changed, now: null, live: livePanel(run) }));
  const shared = chartGroup(), shownOf = () => histories.filter(history => !hiddenRuns.hidden.has(history.run.name));
  shared.axis = axis(shownOf);
  shared.span = () => {
    const places = shownOf().flatMap(history => [history.lines[0], history.lines.at(-1)].filter(Boolean).map(line => shared.axis.at(history, line)));
    return places.length ? [Math.min(...places), Math.max(...places, 1)] : [0, 1];
  };
  shared.open = (at, owner) => { const run = owner ?? runs[0].name; location.hash = linkTo(run, "rollouts", null, { step: shared.axis.stepAt(run, at) }); };
  await Promise.all(histories.map(readMetrics));

  const parts = { server: el("div", { class: "server-error", role: "status" }), facts: el("div", { class: "facts-all" }), live: el("div", { class: "stack" }, histories.map(history => history.live.node)), alarms: el("div", { class: "stack", "aria-live": "polite" }), charts: el("div", { class: "charts" }), settings: el("div") };
  const values = valuesTable(runs[0]);
  const tools = toolbar(shared, histories, () => update());
  put(frame, el("h1", { class: "unseen" }, runs.length > 1 ? "Runs" : `Run ${runs[0].name}`), parts.server, parts.facts, parts.live, parts.alarms, tools.node, el("h2", { class: "unseen" }, "Curves"), parts.charts, values.node, runs.map(run => notesPanel(run, runs.length > 1)), parts.settings);
  const drawn = new Map();
  let timer = 0, closed = false, trouble = null;
  const updateFacts = () => {
    const facts = histories.map(history => runFacts(history, histories.length > 1, trouble));
    if (!facts.every((node, index) => node.isEqualNode(parts.facts.children[index]))) keepFocus(parts.facts, () => put(parts.facts, facts));
    for (const history of histories) history.live.set(trouble || hasFinished(history) && !isEvaluated(history) ? null : history.now, histories.length > 1);
  };
  let alarmed = "";
  const updateAlarms = () => {
    const latest = JSON.stringify(histories.map(history => history.alarms)), open = $("details", parts.alarms)?.open;
    if (latest === alarmed) return;
    alarmed = latest;
    keepFocus(parts.alarms, () => { put(parts.alarms, alarmList(histories)); if (open) $("details", parts.alarms)?.setAttribute("open", ""); });
  };
  const update = () => {
    updateFacts();
    updateAlarms();
    tools.offer();
    const drawnCharts = drawCharts(parts.charts, shared, drawn, shownOf(), histories.length > 1, update);
    values.set(shared.along ? [] : drawnCharts); // a table by step
  };
  put(parts.settings, settingsPanel(runs));
  update();
  Promise.all(histories.map(async history => { history.alarms = await fetchAlarms(history.run.name); })).then(() => closed || updateAlarms(), () => {});
  /** Reads what is new, and returns true if there was anything. A run's settings appear when it starts. */
  const checkForNews = async () => {
    const unstarted = histories.filter(({ run }) => !hasStarted(run));
    if (unstarted.length) {
      const known = (await listed()).runs;
      for (const { run } of unstarted) Object.assign(run, known.find(history => history.name === run.name));
      if (unstarted.some(({ run }) => hasStarted(run))) put(parts.settings, settingsPanel(runs));
    }
    const hasNews = await Promise.all(histories.map(readMetrics)), missed = trouble !== null;
    for (const [index, history] of histories.entries()) if (hasNews[index] || missed) history.alarms = await fetchAlarms(history.run.name);
    return missed || hasNews.some(Boolean);
  };
  const poll = async () => {
    if (!document.hidden) {
      let hasNews = false;
      try { hasNews = await checkForNews(); trouble = null; } catch (error) { if (!(error instanceof Refusal)) throw error; trouble = error; }
      if (closed) return;
      put(parts.server, trouble && el("p", { class: "notice small" }, `${trouble.message} ${trouble.remedy}`));
      hasNews ? update() : updateFacts();
    }
    timer = setTimeout(poll, POLL_MS);
  };
  timer = setTimeout(poll, POLL_MS);
  requestAnimationFrame(() => shared.draw());
  return { title: runs.map(run => run.name).join(", "), leave: () => { closed = true; clearTimeout(timer); shared.close(); },
    actions: { Escape: () => shared.zoom ? shared.focus(null) : false } };
}

const hasStarted = run => Object.keys(run.settings).length > 0;

/** Reads new metrics, and returns true if there were any. */
async function readMetrics(history) {
  const response = await fetchMetrics(history.run.name, history.from);
  if (response.again) history.lines = [];
  history.lines = history.lines.concat(response.lines);
  history.from = response.at;
  history.changed = response.changed ?? history.changed;
  history.now = response.now ?? null;
  return response.again || response.lines.length > 0;
}

function latest(history, name) {
  for (let index = history.lines.length - 1; index >= 0; index -= 1) {
    const value = history.lines[index][name];
    if (value !== undefined && value !== null) return [value, history.lines[index].step];
  }
  return [null, null];
}

const hasFinished = ({ lines, run }) => Boolean(run.steps) && (lines.at(-1)?.step ?? 0) >= run.steps;
const isEvaluated = ({ now }) => isAlive(now) && !now.steps; // by `eval`, which may come long after the run
function runFacts(history, several, trouble) {
  const step = history.lines.at(-1)?.step ?? 0, all = history.run.steps;
  const age = history.changed ? Date.now() / 1000 - history.changed : null;
  const finished = hasFinished(history), live = !finished && !trouble && (history.now ? isAlive(history.now) : age !== null && age < FRESH_S);
  const state = !history.lines.length && !history.now ? "no metrics yet" : finished ? "finished" : trouble ? "no answer" : live ? "running" : `no change since ${clock(history.changed)}`;
  const spent = history.lines.reduce((sum, line) => sum + secondsOf(line), 0);
  const [reward] = latest(history, "reward/mean"), [sampled] = latest(history, "success/sampled"), [greedy, when] = latest(history, "eval/greedy");
  const fact = (label, value, more) => el("div", { class: "fact" }, el("dt", { class: "label" }, label), el("dd", {}, el("b", { class: "number" }, value), more ? el("span", { class: "dim small" }, " ", more) : null));
  return el("section", { class: "facts", "aria-label": history.run.name },
    el("div", { class: "run-title" }, several ? el("span", { class: "swatch", style: { background: colourOf(history.place) } }) : null,
      el("a", { class: "runname", href: linkTo(history.run.name, "rollouts") }, history.run.name),
      el("span", { class: "chip", data: { state: finished ? "over" : live ? "live" : "still" } }, state), history.run.tags.map(tag => el("span", { class: "chip" }, tag))),
    el("dl", {}, fact("Step", integer(step), all ? `of ${integer(all)}` : ""),
      fact("Reward", reward === null ? "–" : number(reward, 3)),
      fact("Sampled", percent(sampled)),
      fact("Greedy", percent(greedy), when === null ? "" : when ? `after ${when}` : "before"),
      fact("Time", spent ? seconds(spent) : "–", step ? `${seconds(spent / Math.max(1, step))} a step` : "")));
}

function alarmList(histories) {
  const alarms = histories.flatMap(history => history.alarms.map(alarm => ({ ...alarm, history })));
  if (!alarms.length) return null;
  const show = alarm => el("li", { class: "notice alarm" },
    el("p", {}, histories.length > 1 ? `${alarm.history.run.name}, ` : "", el("a", { href: linkTo(alarm.history.run.name, "rollouts", null, { step: alarm.step }) }, `step ${alarm.step}`), alarm.step > 1 ? [" (", el("a", { href: linkTo(alarm.history.run.name, "compare", `${alarm.step - 1}-${alarm.step}`) }, "what changed"), ")"] : null, ": ", withCode(alarm.seen)),
    alarm.likely ? el("p", { class: "dim small" }, withCode(alarm.likely)) : null,
    alarm.remedy ? el("p", { class: "small remedy" }, withCode(alarm.remedy)) : null);
  const withCode = text => text.split("`").map((part, place) => place % 2 ? el("code", {}, part) : part);
  const last = alarms.slice(-2).reverse(), rest = alarms.slice(0, -2).reverse();
  return el("section", { class: "stack", "aria-label": "Alarms" }, el("ul", { class: "alarms" }, last.map(show)),
    rest.length ? el("details", {}, el("summary", {}, `${count(rest.length, "earlier alarm")}`), el("ul", { class: "alarms" }, rest.map(show))) : null);
}

const added = new Set(); // metrics of which a chart was added, until the page is closed
/** `node`, and `offer()` with the metrics that there are by now. */
function toolbar(shared, histories, fill) {
  const reset = el("button", { class: "quiet", hidden: true, on: { click: () => shared.focus(null) } }, "Whole run");
  shared.changed = () => { reset.hidden = !shared.zoom; };
  const slider = el("input", { type: "range", id: "smooth", min: 0, max: 1, step: .05, value: shared.smooth,
    on: { input: event => { shared.smooth = Number(event.target.value); shared.draw(); } } });
  const toggles = histories.length > 1 ? histories.map(history => el("label", { class: "toggle" },
    el("input", { type: "checkbox", checked: !hiddenRuns.hidden.has(history.run.name), on: { change: event => {
      event.target.checked ? hiddenRuns.hidden.delete(history.run.name) : hiddenRuns.hidden.add(history.run.name); fill(); } } }),
    el("span", { class: "swatch", style: { background: colourOf(history.place) } }), history.run.name)) : null;
  const along = el("select", { id: "along", on: { change: event => { shared.axis.choose(event.target.value, shared); fill(); } } }, Object.keys(AXES).map(name => el("option", { value: name }, name)));
  const metric = el("select", { id: "metric", on: { change: event => { added.add(event.target.value); event.target.value = ""; fill(); } } });
  let offered = 0;
  const offer = () => {
    const names = [...new Set(histories.flatMap(({ lines }) => lines.flatMap(Object.keys)))].filter(name => name !== "step").sort();
    if (names.length !== offered) put(metric, el("option", { value: "" }, "a metric"), names.map(name => el("option", { value: name }, name)));
    offered = names.length;
  };
  const labelled = (id, words, control) => el("label", { class: "row centre", for: id }, el("span", { class: "label" }, words), control);
  return { offer, node: el("div", { class: "row centre toolbar" }, toggles, el("span", { class: "grow" }), reset,
    labelled("metric", "Add", metric), labelled("along", "By", along), labelled("smooth", "Smoothing", slider),
    el("span", { class: "label hint", id: "chart-keys" }, "click, or Enter: the step's rollouts; drag, or ⇧ ← → and Enter: zoom")) };
}

function drawCharts(parent, shared, drawn, shown, several, fill) {
  const nodes = [];
  const own = [...added].map(name => ({ title: name, unit: "", scale: "linear", names: { [name]: name }, remove: () => { added.delete(name); fill(); } }));
  const charts = [...own, ...shown[0]?.run.charts ?? []], named = charts.map(chart => new Set(shown.flatMap(history => chartMetrics(chart, history).map(([, name]) => name))));
  const phases = shown.map(phaseLayers), uses = [...named, ...phases.map(layers => layers.map(layer => layer.name))].flatMap(names => [...names]);
  const meanings = new Map([...new Set(uses)].filter(name => uses.indexOf(name) !== uses.lastIndexOf(name)).map((name, place) => [name, place]));
  for (const [index, chart] of charts.entries()) {
    // With several runs, each has a colour; dashes distinguish runs and metrics of the same colour.
    const names = [...named[index]], looks = looksOf(names, meanings);
    const curves = shown.flatMap(history => chartMetrics(chart, history).map(([metric, name], place, all) => ({
      name: several ? `${history.run.name} ${name}` : name,
      ...(several ? { hue: colourOf(history.place), dash: dashOf((place + all.length * Math.floor(history.place / 6)) % 6) } : looks[names.indexOf(name)]),
      owner: history.run.name, sparse: metric.startsWith("eval/"), points: pointsOf(history, metric, chart, shared) })))
      .filter(curve => curve.points.length);
    if (curves.length) nodes.push([...place(drawn, chart.title, () => lineChart(shared, chart), curves), chart]);
  }
  for (const [index, history] of shared.along ? [] : shown.entries()) {
    const looks = looksOf(phases[index].map(layer => layer.name), meanings), layers = phases[index].map((layer, place) => ({ ...layer, hue: looks[place].hue }));
    const about = { title: several ? `Time, ${history.run.name}` : "Time", unit: "seconds a step", scale: "time" };
    if (layers.length) nodes.push([...place(drawn, about.title, () => stackedChart(shared, about), layers, "wide"), about]);
  }
  function place(histories, title, make, values, also) {
    let history = histories.get(title);
    if (!history) { histories.set(title, history = make(title)); shared.add(history); }
    if (also) history.node.classList.add(also);
    return [history, values];
  }
  const wanted = nodes.map(([history]) => history.node);
  if (wanted.length !== parent.children.length || wanted.some((node, hiddenRuns) => node !== parent.children[hiddenRuns])) put(parent, wanted);
  if (!wanted.length) put(parent, el("div", { class: "panel empty wide" }, el("h2", {}, "No metrics yet"), el("p", {}, "Curves appear here when the first step has ended.")));
  for (const [history, values] of nodes) history.set(values);
  return nodes.map(([, curves, { title, unit, scale }]) => ({ title, unit, scale, curves }));
}
/** The points of a metric. Where a step lacks it, but has others of the chart, it is what the chart says, or a gap. */
function pointsOf(history, metric, { within, absent }, shared) {
  const valueOf = line => line[metric] ?? (absent !== undefined && Object.keys(line).some(name => name.startsWith(within)) ? absent : null);
  return history.lines.map(line => [shared.axis.at(history, line), valueOf(line)]).filter(([, value]) => value !== null);
}
const byNumber = new Intl.Collator("en", { numeric: true }).compare;
/** Of many ranks or workers, those with the lowest and the highest values of the latest step: a chart can show a dozen. */
function outermost(history, names) {
  if (names.length <= MANY) return names;
  const line = history.lines.findLast(line => names.some(name => line[name] !== undefined)) ?? {};
  const ordered = names.filter(name => line[name] !== undefined).sort((a, b) => line[a] - line[b]);
  const shown = new Set([...ordered.slice(0, MANY / 2), ...ordered.slice(-MANY / 2)]);
  return names.filter(name => shown.has(name));
}
function chartMetrics(chart, history) {
  const names = Object.entries(chart.names ?? {});
  if (!chart.within) return names;
  const ending = chart.ending ?? "";
  const inside = new Set(history.lines.flatMap(line => Object.keys(line).filter(name => name.startsWith(chart.within) && name.endsWith(ending) && !(chart.without ?? []).includes(name))));
  const more = outermost(history, [...inside].sort(byNumber)).map(name => [name, name.slice(chart.within.length, name.length - ending.length).replace(/^rank_/, "rank ")]);
  return [...names, ...(names.length && more.length < 2 ? [] : more)];
}
function phaseLayers(history) {
  const steps = history.lines.filter(line => line.step > 0), sums = {};
  for (const line of steps) for (const [name, value] of Object.entries(line)) if (isPhase(name)) sums[name] = (sums[name] ?? 0) + value;
  return Object.entries(sums).sort((a, b) => b[1] - a[1]).map(([name]) => ({ owner: history.run.name, name: name.slice(5, -2).replaceAll("_", " "), points: steps.map(line => [line.step, line[name] ?? 0]) }));
}

function settingsPanel(runs) {
  const all = runs.map(run => ({ ...run.settings, engine: run.engine, ...Object.fromEntries(Object.entries(run.versions).map(([name, value]) => [`versions.${name}`, value])) }));
  const names = [...new Set(all.flatMap(Object.keys))].sort();
  if (!names.length) return null;
  const differs = name => new Set(all.map(history => JSON.stringify(history[name]))).size > 1;
  const differing = names.filter(differs);
  const body = el("tbody");
  const search = el("input", { type: "search", placeholder: "Find a setting", "aria-label": "Find a setting", on: { input: () => fill() } });
  const only = el("input", { type: "checkbox", checked: runs.length > 1, on: { change: () => fill() } });
  const shown = value => value === undefined ? "–" : typeof value === "string" ? value || "“”" : JSON.stringify(value);
  const fill = () => {
    const text = search.value.trim().toLowerCase();
    const matching = names.filter(name => (runs.length < 2 || !only.checked || differs(name)) && (!text || name.toLowerCase().includes(text) || all.some(history => shown(history[name]).toLowerCase().includes(text))));
    put(body, matching.length ? matching.map(name => el("tr", { class: differs(name) ? "differs" : null }, el("th", { scope: "row", class: "mono" }, name), all.map(history => el("td", { class: "mono" }, shown(history[name])))))
      : el("tr", {}, el("td", { colspan: 9, class: "dim" }, text ? "No such setting." : "The settings are the same.")));
  };
  fill();
  return el("details", { class: "panel settings", open: runs.length > 1 }, el("summary", {}, el("h2", {}, "Settings"), el("span", { class: "dim small" }, runs.length > 1 ? `${count(differing.length, "difference")} among ${names.length}` : `${names.length}`)),
    el("div", { class: "row centre" }, el("div", { class: "grow" }, search), runs.length > 1 ? el("label", { class: "toggle" }, only, "only what differs") : null),
    el("div", { class: "scroll" }, el("table", {}, el("thead", {}, el("tr", {}, el("th", { scope: "col" }, "Setting"), runs.map(run => el("th", { scope: "col" }, run.name)))), body)));
}

const SILENT_S = 30; // a run that trains writes every second
const STATES = [["ended", "ended"], ["generating", "generating"], ["calling", "calling tools"], ["interacting", "in feedback"], ["pending", "waiting"]];
const ANNOUNCED_PARTS = 4; // a screen reader is told each quarter of a phase, and each phase

const isAlive = now => Boolean(now) && now.age_s < SILENT_S;
/** The panel of a run: `node`, and `set(now, several)` with the latest news, or null. */
function livePanel(run) {
  const title = el("h2"), bar = el("div", { class: "live-bar", role: "progressbar", "aria-label": `${run.name}: progress`, "aria-valuemin": 0 });
  const legend = el("ul", { class: "states" }), pace = el("p", { class: "small number" }), trouble = el("p", { class: "notice small", hidden: true });
  const spoken = el("p", { class: "unseen", role: "status" });
  const node = el("section", { class: "panel live", "aria-label": `${run.name}, now`, hidden: true }, el("div", { class: "row between" }, title, pace), bar, legend, trouble, spoken);
  let said = "";
  const set = (now, several) => {
    node.hidden = !now;
    if (!now) return;
    const alive = isAlive(now), { done, all, unit } = progressOf(now);
    put(title, several ? `${run.name}: ` : "", headline(now));
    put(pace, paceOf(now, alive));
    trouble.hidden = alive;
    put(trouble, alive ? "" : `No sign of life for ${wholeSeconds(now.age_s)}: the process was killed, or its machine stands still. `, alive || !now.steps ? "" : "If it has ended, --resume continues it.");
    bar.hidden = !all;
    for (const [name, value] of Object.entries({ valuemax: all, valuenow: done, valuetext: `${integer(done)} of ${integer(all)} ${unit}` })) bar.setAttribute(`aria-${name}`, value);
    put(bar, now.total_passes ? segment("ended", done, all) : STATES.slice(0, -1).map(([state]) => segment(state, now[state], Math.max(all, 1))));
    put(legend, now.total_passes ? el("li", {}, el("b", { class: "number" }, integer(done)), ` of ${integer(all)} micro-batches`) : STATES.filter(([state]) => state === "ended" || now[state]).map(([state, words]) => stateItem(now, state, words)));
    const news = `${title.textContent}, ${all ? Math.floor(done / all * ANNOUNCED_PARTS) * 100 / ANNOUNCED_PARTS : 0} % of the ${unit}${alive ? "" : ", no sign of life"}`;
    if (news.replace(/ for .*?,/, ",") !== said) { said = news.replace(/ for .*?,/, ","); put(spoken, news); }
  };
  return { node, set };
}

function progressOf(now) {
  if (now.total_passes) return { done: now.passes, all: now.total_passes, unit: "micro-batches" };
  return { done: now.ended, all: now.total, unit: "rollouts" };
}
const wholeSeconds = value => seconds(Math.max(1, Math.round(value)));
const capitalized = text => text.slice(0, 1).toUpperCase() + text.slice(1);
function headline(now) {
  if (!now.steps) return now.phase ? [`${capitalized(now.phase)} for ${wholeSeconds(now.phase_s)}`] : ["Starting"]; // an evaluation, or rollouts without training
  return [now.step ? `Step ${integer(now.step)} of ${integer(now.steps)}` : "Before the first step", now.phase ? `: ${now.phase} for ${wholeSeconds(now.phase_s)}` : ""];
}
function paceOf(now, alive) {
  const parts = [`${count(now.written, "token")} in ${count(now.turns, "turn")}`];
  if (!alive) return parts[0];
  parts.unshift(`${number(Math.round(now.written_per_s))} tokens/s`);
  if (now.slowest_tool && now.slowest_p95_s !== null) parts.push(`slowest tool ${now.slowest_tool}, p95 ${seconds(now.slowest_p95_s)}`);
  if (now.left_s !== null) parts.push(`about ${wholeSeconds(now.left_s)} left ${now.left_of}`);
  if (now.run_left_s !== null) parts.push(`${wholeSeconds(now.run_left_s)} of the run`);
  return parts.join(" · ");
}
const segment = (state, value, all) => el("i", { data: { state }, style: { width: `${Math.min(100, value / all * 100)}%` } });
function stateItem(now, state, words) {
  const of = state === "ended" && now.total ? ` of ${integer(now.total)}` : "";
  return el("li", {}, el("i", { class: "swatch", data: { state } }), el("b", { class: "number" }, integer(now[state])), `${of} ${words}`);
}

const MAX_ROWS = 200; // the latest steps

/** `node`, and `set(charts)` with the shown charts: {title, unit, scale, curves: [{name, points}]}. */
function valuesTable(run) {
  const holder = el("div"), select = el("select", { id: "values-of", on: { change: () => fill() } });
  const node = el("details", { class: "panel values", on: { toggle: () => fill() } }, el("summary", {}, el("h2", {}, "Values"), el("span", { class: "dim small" }, "the curves as a table")),
    el("label", { class: "row centre", for: "values-of" }, el("span", { class: "label" }, "Chart"), select), holder);
  let charts = [];
  function fill() {
    if (!node.open) return;
    const chart = charts.find(({ title }) => title === select.value) ?? charts[0];
    keepFocus(holder, () => put(holder, chart ? table(run, chart) : null));
  }
  return { node, set(shown) {
    const titles = shown.map(({ title }) => title), before = select.value;
    if (titles.join("\n") !== charts.map(({ title }) => title).join("\n")) {
      put(select, titles.map(title => el("option", { value: title, selected: title === before }, title)));
    }
    charts = shown;
    node.hidden = !charts.length;
    fill();
  } };
}
function table(run, { title, unit, scale, curves }) {
  const format = scale === "share" ? percent : scale === "time" ? seconds : value => number(value, 4);
  const columns = curves.map(({ points }) => new Map(points)), steps = [...new Set(curves.flatMap(({ points }) => points.map(([step]) => step)))].sort((a, b) => b - a).slice(0, MAX_ROWS);
  const links = step => step < 1 ? String(step) : el("a", { href: linkTo(run.name, "rollouts", null, { step }), "aria-label": `rollouts of step ${step}` }, step);
  const changed = step => step < 2 ? "" : el("a", { href: linkTo(run.name, "compare", `${step - 1}-${step}`), "aria-label": `what changed from step ${step - 1} to ${step}` }, "what changed");
  return dataTable(`${title}, ${unit}`, ["Step", ...curves.map(({ name }) => name), "Since the step before"], steps.map(step => [links(step), ...columns.map(column => format(column.get(step))), changed(step)]), { textFrom: curves.length + 1 });
}
