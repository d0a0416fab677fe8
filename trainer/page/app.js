// The frame of the page: which view an address names, what stands in the bar, and which keys do what.

import { $, count, el, keepToken, keys, put, token } from "./dom.js";
import { file, runs } from "./data.js";
import { view as runView } from "./run.js";
import { view as tableView } from "./table.js";
import { view as rolloutView } from "./rollout.js";
import { view as groupView } from "./group.js";
import { link, place } from "./place.js";

const VIEWS = { run: runView, rollouts: tableView, rollout: rolloutView, group: groupView };
const main = $("#main");
const state = { runs: [], leave: null, acts: {}, shown: 0 };
/** The run that an address names, or the first where it names none; undefined where there is no such run. */
const meant = name => name === null ? state.runs[0] : state.runs.find(one => one.name === name);

/** The token that a link brings along goes into the tab's keeping, and out of sight. */
function takeToken() {
  const given = /^#token=([^&/]+)/.exec(location.hash);
  if (!given) return;
  keepToken(decodeURIComponent(given[1]));
  history.replaceState(null, "", location.pathname + location.search + "#/");
}

async function show() {
  const here = place(), turn = ++state.shown;
  state.leave?.();
  state.leave = null;
  state.acts = {};
  const run = meant(here.run);
  bar(here, run);
  if (!run) return put(main, trouble({ message: `There is no run ${here.run} here.`, remedy: `This page was opened with ${state.runs.map(one => one.name).join(", ")}.` }));
  const frame = el("div", { class: `view ${here.view}` });
  try {
    const made = await VIEWS[here.view]({ frame, run, runs: state.runs, here });
    if (turn !== state.shown) return made?.leave?.();
    state.leave = made?.leave;
    state.acts = made?.acts ?? {};
    if (made?.title) document.title = `${made.title} · mtrl`;
  } catch (error) {
    if (turn === state.shown) put(main, trouble(error));
    return;
  }
  put(main, frame);
  if (here.view !== "rollout" || !(here.asked.token || here.asked.turn)) scrollTo(0, 0);
}

function trouble(error) {
  console.info(error);
  return el("div", { class: "panel empty", role: "alert" }, el("h2", {}, "That cannot be shown"), el("p", {}, error.message),
    error.remedy ? el("p", {}, error.remedy) : null);
}

function bar(here, named) {
  const run = named ?? state.runs[0];
  const tab = (name, to, on) => el("a", { class: "tab", href: to, "aria-current": on ? "page" : null }, name);
  const choose = named && state.runs.length > 1 && here.view !== "run"
    ? el("select", { class: "which", "aria-label": "Run", value: run.name,
        on: { change: event => { location.hash = link(event.target.value, "rollouts"); } } },
        state.runs.map(one => el("option", { value: one.name, selected: one === run }, one.name)))
    : el("span", { class: "which" }, state.runs.length > 1 ? count(state.runs.length, "run") : run.name);
  put($("#bar"), el("a", { class: "name", href: link(run.name, "run") }, "mtrl"), choose,
    el("nav", { "aria-label": "Views" },
      tab("Run", link(run.name, "run"), here.view === "run"),
      tab("Rollouts", link(run.name, "rollouts"), here.view === "rollouts"),
      here.view === "rollout" ? tab(`Rollout ${here.which}`, location.hash, true) : null,
      here.view === "group" ? tab(`Group ${here.which}`, location.hash, true) : null),
    el("span", { class: "grow" }),
    file ? el("span", { class: "tag" }, "exported") : null,
    token() ? el("button", { class: "quiet", on: { click: () => { keepToken(""); location.reload(); } } }, "Forget token") : null,
    el("button", { class: "quiet", "aria-label": "Keys", title: "Keys", on: { click: help } }, el("kbd", {}, "?")));
}

const KEYS = [
  ["g", "the run"], ["t", "the table of rollouts"], ["/", "search"], ["j  k", "next, previous: row, or rollout"],
  ["Enter", "open the row"], ["[  ]", "previous, next sibling"], ["c", "siblings side by side"], ["n  p", "next, previous turn"],
  ["← →", "token by token, or step by step in a chart"], ["⇧ ← →  Enter", "mark steps in a chart, and zoom in on them"], ["1 – 6", "what tokens are coloured by"], ["r", "unfold reasoning"],
  ["Esc", "back: mark, zoom, token, table"], ["?", "this"],
];
function help() {
  if ($("dialog")) return;
  const box = el("dialog", { "aria-labelledby": "keys-title", on: { close: () => box.remove(), click: event => event.target === box && box.close() } },
    el("div", { class: "stack" }, el("h2", { id: "keys-title" }, "Keys"),
      el("dl", { class: "keys" }, KEYS.map(([key, what]) => [el("dt", {}, key.split("  ").map(one => el("kbd", {}, one))), el("dd", {}, what)])),
      el("form", { method: "dialog" }, el("button", {}, "Close"))));
  document.body.append(box);
  box.showModal();
}

const NAMES = ["j", "k", "n", "p", "c", "r", "[", "]", "/", "Enter", "Escape", "ArrowDown", "ArrowUp", "ArrowLeft", "ArrowRight", "1", "2", "3", "4", "5", "6"];
function listen() {
  document.addEventListener("keydown", event => {
    if (event.ctrlKey || event.altKey || event.metaKey || event.isComposing || event.defaultPrevented) return;
    const typing = event.target.closest?.("input, select, textarea, dialog");
    if (typing && event.key !== "Escape") return;
    if (typing?.matches("dialog")) return;
    if (["Enter", " "].includes(event.key) && event.target.closest?.("a, button, summary")) return;
    const act = NAMES.includes(event.key) && state.acts[event.key];
    if (act && act(event) !== false) event.preventDefault();
  });
  const go = view => { location.hash = link((meant(place().run) ?? state.runs[0]).name, view); };
  keys({ "?": help, g: () => go("run"), t: () => go("rollouts") });
  addEventListener("hashchange", () => { takeToken(); show(); });
}

takeToken();
try {
  state.runs = (await runs()).runs;
  listen();
  await show();
} catch (error) {
  put(main, trouble(error));
}
