// The page's frame: shows the view for the address, the bar, and handles keys.

import { $, count, el, keepFocus, storeToken, keys, put, token } from "./dom.js";
import { view as compareView } from "./compare.js";
import { fetchRuns, linkTo, parseAddress } from "./data.js";
import { view as groupView } from "./group.js";
import { view as rolloutView } from "./rollout.js";
import { view as runView } from "./run.js";
import { view as tableView } from "./table.js";

const VIEWS = { run: runView, rollouts: tableView, rollout: rolloutView, group: groupView, compare: compareView };
const main = $("#main");
const state = { runs: [], leave: null, actions: {}, shown: 0, frame: null };
/** The run of an address, by default the first; undefined if there is no such run. */
const findRun = name => name === null ? state.runs[0] : state.runs.find(run => run.name === name);

/** Stores the access token of a link in the tab's session storage, and removes it from the address. */
function takeToken() {
  const match = /^#token=([^&/]+)/.exec(location.hash);
  if (!match) return;
  storeToken(decodeURIComponent(match[1]));
  history.replaceState(null, "", location.pathname + location.search + "#/");
}

async function show() {
  const address = parseAddress(), turn = ++state.shown;
  state.leave?.();
  state.leave = null;
  state.actions = {};
  const run = findRun(address.run);
  drawBar(address, run);
  if (!run) return put(main, errorPanel({ message: `There is no run ${address.run} here.`, remedy: `This page was opened with ${state.runs.map(run => run.name).join(", ")}.` }));
  const frame = el("div", { class: `view ${address.view}` });
  try {
    const shown = await VIEWS[address.view]({ frame, run, runs: state.runs, address });
    if (turn !== state.shown) return shown?.leave?.();
    state.leave = shown?.leave;
    state.actions = shown?.actions ?? {};
    if (shown?.title) document.title = `${shown.title} · mtrl`;
  } catch (error) {
    if (turn === state.shown) placeFrame(errorPanel(error), "This cannot be shown");
    return;
  }
  placeFrame(frame, document.title);
  if (address.view !== "rollout" || !(address.params.token || address.params.turn)) scrollTo(0, 0);
}

/** Shows a view. The focus stays on the control that it was on, if the new view has it too; else it moves to the view. */
function placeFrame(frame, title) {
  const isFirst = state.frame === null;
  keepFocus(main, () => put(main, frame));
  main.setAttribute("aria-label", title);
  if (!isFirst && document.activeElement === document.body) main.focus({ preventScroll: true });
  state.frame = frame;
}

function errorPanel(error) {
  console.info(error);
  return el("div", { class: "panel empty", role: "alert" }, el("h1", {}, "This cannot be shown"), el("p", {}, error.message),
    error.remedy ? el("p", {}, error.remedy) : null);
}

function drawBar(address, found) {
  const run = found ?? state.runs[0];
  const tab = (name, to, on) => el("a", { class: "tab", href: to, "aria-current": on ? "page" : null }, name);
  const choose = found && state.runs.length > 1 && address.view !== "run"
    ? el("select", { class: "which", "aria-label": "Run", value: run.name,
        on: { change: event => { location.hash = linkTo(event.target.value, "rollouts"); } } },
        state.runs.map(item => el("option", { value: item.name, selected: item === run }, item.name)))
    : el("span", { class: "which" }, state.runs.length > 1 ? count(state.runs.length, "run") : run.name);
  put($("#bar"), el("a", { class: "name", href: linkTo(run.name, "run") }, "mtrl"), choose,
    el("nav", { "aria-label": "Views" },
      tab("Run", linkTo(run.name, "run"), address.view === "run"),
      tab("Rollouts", linkTo(run.name, "rollouts"), address.view === "rollouts"),
      address.view === "compare" ? tab(`Steps ${address.item}`, location.hash, true) : null,
      address.view === "rollout" ? tab(`Rollout ${address.item}`, location.hash, true) : null,
      address.view === "group" ? tab(`Group ${address.item}`, location.hash, true) : null),
    el("span", { class: "grow" }),
    token() ? el("button", { class: "quiet", on: { click: () => { storeToken(""); location.reload(); } } }, "Forget token") : null,
    el("button", { class: "quiet", "aria-label": "Keys", title: "Keys", on: { click: showKeys } }, el("kbd", {}, "?")));
}

const KEY_HELP = [
  ["g", "the run"], ["t", "the table of rollouts"], ["w", "what changed since the step before"], ["/", "search"], ["j  k", "next, previous: row, or rollout"],
  ["Enter", "open the row"], ["[  ]", "previous, next sibling"], ["c", "siblings side by side"], ["n  p", "next, previous turn"],
  ["← →", "token by token, or step by step in a chart"], ["Enter", "in a chart: the step's rollouts"], ["⇧ ← →  Enter", "select steps in a chart, and zoom in"], ["1 – 6", "colour tokens by"], ["r", "unfold reasoning"],
  ["Esc", "back: selection, zoom, token, table"], ["?", "this help"],
];
function showKeys() {
  if ($("dialog")) return;
  const dialog = el("dialog", { "aria-labelledby": "keys-title", on: { close: () => dialog.remove(), click: event => event.target === dialog && dialog.close() } },
    el("div", { class: "stack" }, el("h2", { id: "keys-title" }, "Keys"),
      el("dl", { class: "keys" }, KEY_HELP.map(([key, text]) => [el("dt", {}, key.split("  ").map(name => el("kbd", {}, name))), el("dd", {}, text)])),
      el("form", { method: "dialog" }, el("button", {}, "Close"))));
  document.body.append(dialog);
  dialog.showModal();
}

const ACTION_KEYS = ["j", "k", "w", "n", "p", "c", "r", "[", "]", "/", "Enter", "Escape", "ArrowDown", "ArrowUp", "ArrowLeft", "ArrowRight", "1", "2", "3", "4", "5", "6"];
function listen() {
  document.addEventListener("keydown", event => {
    if (event.ctrlKey || event.altKey || event.metaKey || event.isComposing || event.defaultPrevented) return;
    const typing = event.target.closest?.("input, select, textarea, dialog");
    if (typing && event.key !== "Escape") return;
    if (typing?.matches("dialog")) return;
    if (["Enter", " "].includes(event.key) && event.target.closest?.("a, button, summary")) return;
    const action = ACTION_KEYS.includes(event.key) && state.actions[event.key];
    if (action && action(event) !== false) event.preventDefault();
  });
  const go = view => { location.hash = linkTo((findRun(parseAddress().run) ?? state.runs[0]).name, view); };
  keys({ "?": showKeys, g: () => go("run"), t: () => go("rollouts") });
  addEventListener("hashchange", () => { takeToken(); show(); });
}

takeToken();
try {
  state.runs = (await fetchRuns()).runs;
  listen();
  await show();
} catch (error) {
  put(main, errorPanel(error));
}
