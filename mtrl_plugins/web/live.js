// What a run is doing now: its phase, how many rollouts have ended, what the others do, the pace, and the time that is left.

import { count, el, integer, number, put, seconds } from "./dom.js";

const SILENT_S = 30; // a run that trains writes every second
const STATES = [["ended", "ended"], ["generating", "generating"], ["calling", "calling tools"], ["interacting", "in feedback"], ["pending", "waiting"]];
const ANNOUNCED_PARTS = 4; // a screen reader is told each quarter of a phase, and each phase

export const isAlive = now => Boolean(now) && now.age_s < SILENT_S;
/** The panel of a run: `node`, and `set(now, several)` with the latest news, or null. */
export function livePanel(run) {
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
    put(legend, now.total_passes ? el("li", {}, el("b", { class: "number" }, integer(done)), ` of ${integer(all)} micro-batches`) : STATES.filter(([state]) => state === "ended" || now[state]).map(([state, words]) => legendItem(now, state, words)));
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
function legendItem(now, state, words) {
  const of = state === "ended" && now.total ? ` of ${integer(now.total)}` : "";
  return el("li", {}, el("i", { class: "swatch", data: { state } }), el("b", { class: "number" }, integer(now[state])), `${of} ${words}`);
}
