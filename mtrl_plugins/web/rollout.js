// A rollout: its timeline, turn by turn, the conversation, and beside it the ledger's tokens, entry by entry.

import { $, $$, count, el, number, put, integer, seconds } from "./dom.js";
import { conversationEntry as speech } from "./conversation.js";
import { fetchRollout, linkTo, updateAddress } from "./data.js";
import { MODES, modeLegend, paintTokens, tokenScale, tokenDetails, ledgerTokens, tokenChunks } from "./ledger.js";
import { cameFrom, neighbour } from "./table.js";

const settings = { mode: "author" }; // kept between rollouts

export async function view({ frame, run, address }) {
  const rollout = await fetchRollout(run.name, Number(address.item));
  const ledgerOfTurn = turn => rollout.ledgers.findIndex(({ entries }) => entries.some(entry => entry.author === "policy" && entry.turn === turn));
  let ledger = startLedger(rollout, address.params, ledgerOfTurn), tokens = [], scale = null, current = null, pinned = null;
  if (address.params.by && MODES.some(([name]) => name === address.params.by)) settings.mode = address.params.by;

  const body = el("div", { class: "entries" }), inspector = el("aside", { class: "inspector", "aria-live": "polite", "aria-label": "Token" });
  const key = el("div", { class: "key" });
  const modes = el("div", { class: "modes", role: "radiogroup", "aria-label": "Colour tokens by" }, MODES.map(([name, title], index) =>
    el("button", { class: "mode", role: "radio", "aria-checked": String(name === settings.mode), data: { mode: name }, title: `${title} (${index + 1})`, on: { click: () => recolour(name) } }, title)));

  const drawn = tokenChunks((node, list) => paintTokens(run.name, node, list, settings.mode, scale));
  function recolour(mode) {
    settings.mode = mode;
    $$(".mode", modes).forEach(node => node.setAttribute("aria-checked", String(node.dataset.mode === mode)));
    drawn.again();
    put(key, modeLegend(mode, tokens));
    updateAddress({ by: mode === "author" ? "" : mode });
    showToken();
  }
  function fill() {
    tokens = ledgerTokens(rollout.ledgers[ledger]);
    scale = tokenScale(tokens);
    drawn.clear();
    const of = Map.groupBy(tokens, token => token.entry);
    put(body, rollout.ledgers[ledger].entries.map(entry => el("section", { class: "entry", data: { author: entry.author, turn: entry.author === "policy" ? entry.turn : null } },
      speech(run, entry), el("div", { class: "side" },
        entry.ids?.length ? drawn.fill(el("p", { class: "ids mono" }), of.get(entry)) : el("p", { class: "dim small" }, "no tokens: the policy never read it"),
        el("p", { class: "dim tiny number" }, entry.ids?.length ? `tokens ${entry.start}–${entry.start + entry.ids.length - 1}` : "", entry.version !== undefined ? ` · version ${entry.version}` : "", entry.author === "policy" ? ` · cached ${integer(entry.cached ?? 0)} of ${integer(entry.seen)}` : "", entry.stop === "length" ? " · reached the length limit" : entry.stop === "abort" ? " · aborted" : "", entry.info?.changed_by_agent ? ` · changed by the agent: ${[entry.info.changed_by_agent].flat().join(", ")}` : "")))));
    recolour(settings.mode);
  }
  function showToken() {
    $$(".t.on", body).forEach(node => node.classList.remove("on"));
    const token = pinned ?? current;
    if (token === null) return put(inspector, el("p", { class: "dim" }, "Point at a token, or walk with ", el("kbd", {}, "←"), " ", el("kbd", {}, "→"), " to see its advantage, and why it is trained or not."));
    $(`#t${token.at}`, body)?.classList.add("on");
    put(inspector, tokenDetails(token, rollout), pinned ? el("button", { class: "quiet close", "aria-label": "Close the token", on: { click: () => pin(null) } }, "×") : null);
  }
  function pin(token, move = true) {
    pinned = token;
    updateTokenAddress({ token: token ? token.at : "" });
    if (token) drawn.show(token);
    showToken();
    if (token && move) scrollIntoPlace($(`#t${token.at}`, body), "center");
  }
  const updateTokenAddress = params => updateAddress({ token: "", turn: "", ledger: rollout.ledgers.length > 1 ? ledger + 1 : "", ...params });
  function openLedger(index) {
    ledger = index;
    pinned = current = null;
    $$("button", ledgerButtons).forEach((node, at) => node.setAttribute("aria-pressed", String(at === index)));
    fill();
    updateTokenAddress({});
  }
  const ledgerButtons = el("div", { class: "row centre" }, el("span", { class: "label" }, rollout.ledgers[0].branch ? "Its chats" : "The policy saw a new history; ledger"), rollout.ledgers.map(({ branch }, index) =>
    el("button", { class: "mode", "aria-pressed": String(index === ledger), on: { click: () => openLedger(index) } }, branch ?? index + 1)));
  const tokenAt = event => { const node = event.target.closest?.(".t"); return node ? tokens[Number(node.dataset.at)] : null; };
  body.addEventListener("pointerover", event => { const token = tokenAt(event); if (token !== current) { current = token; showToken(); } });
  body.addEventListener("pointerleave", () => { current = null; showToken(); });
  body.addEventListener("click", event => { const token = tokenAt(event); if (token && getSelection().isCollapsed) pin(token === pinned ? null : token, false); });

  function toTurn(turn) {
    const index = ledgerOfTurn(turn);
    if (index < 0) return;
    if (index !== ledger) openLedger(index);
    scrollIntoPlace($(`.entry[data-turn="${turn}"]`, body), "start");
    updateTokenAddress({ turn });
  }
  /** Scrolls to the next or previous turn. */
  function turnBy(direction) {
    const offset = node => node.getBoundingClientRect().top - parseFloat(getComputedStyle(node).scrollMarginTop);
    const turns = $$(".entry[data-turn]", body), next = direction > 0 ? turns.find(node => offset(node) > 4) : turns.findLast(node => offset(node) < -4);
    if (next) toTurn(Number(next.dataset.turn));
  }
  function moveToken(direction) {
    if (!tokens.length) return;
    const from = pinned ? pinned.at + direction : direction > 0 ? 0 : tokens.length - 1;
    if (tokens[from]) pin(tokens[from]);
  }
  async function goToNeighbour(direction) { const index = await neighbour(run.name, Number(address.item), direction); if (index !== null) location.hash = linkTo(run.name, "rollout", index, modeParams()); }
  const modeParams = () => settings.mode === "author" ? {} : { by: settings.mode };
  const goToSibling = direction => { const at = rollout.siblings.findIndex(other => other.place === Number(address.item)), next = rollout.siblings[at + direction]; if (next) location.hash = linkTo(run.name, "rollout", next.place, modeParams()); };
  const unfold = () => { const folded = $$("details.fold", body), openLedger = folded.some(node => !node.open); folded.forEach(node => { node.open = openLedger; }); };

  fill();
  put(frame, header(run, rollout, modeParams), timeline(rollout, toTurn),
    rollout.silent ? el("p", { class: "notice small" }, `Tokens are shown as ids: ${rollout.silent}.`) : null,
    rollout.ledgers.length > 1 ? ledgerButtons : null, missingNotice(rollout, address.params, ledgerOfTurn, ledger, tokens),
    el("div", { class: "panel flush both" }, el("div", { class: "heads" }, el("h2", {}, "Conversation"), el("div", { class: "row centre between" }, el("h2", {}, "Ledger"), modes, key)), body, inspector));
  requestAnimationFrame(() => {
    if (!frame.isConnected) return;
    const token = tokens[Number(address.params.token)];
    if (token) pin(token);
    else if (address.params.turn !== undefined) toTurn(Number(address.params.turn));
  });
  const numbers = Object.fromEntries(MODES.map(([name], index) => [String(index + 1), () => recolour(name)]));
  return { title: `Rollout ${address.item} of ${run.name}`, leave: drawn.clear, actions: { ...numbers, j: () => goToNeighbour(1), k: () => goToNeighbour(-1), "]": () => goToSibling(1), "[": () => goToSibling(-1),
    n: () => turnBy(1), p: () => turnBy(-1), r: unfold, c: () => { location.hash = linkTo(run.name, "group", rollout.group); }, w: () => rollout.row.step ? (location.hash = linkTo(run.name, "compare", `${rollout.row.step - 1}-${rollout.row.step}`)) : false,
    ArrowRight: () => moveToken(1), ArrowLeft: () => moveToken(-1), Escape: () => { if (pinned) pin(null); else location.hash = cameFrom(run.name); } } };
}

/** The ledger to show first: that of the addressed turn, the addressed one, or the last. */
function startLedger(rollout, params, ledgerOfTurn) {
  const last = rollout.ledgers.length - 1;
  if (params.turn !== undefined && ledgerOfTurn(Number(params.turn)) >= 0) return ledgerOfTurn(Number(params.turn));
  return rollout.ledgers[params.ledger - 1] ? params.ledger - 1 : last;
}
/** A notice if the address names a turn, ledger or token that does not exist. */
function missingNotice(rollout, params, ledgerOfTurn, ledger, tokens) {
  const missing = params.turn !== undefined && ledgerOfTurn(Number(params.turn)) < 0 ? `no turn ${params.turn}: it has ${count(rollout.row.turns, "turn")}, and the first is 0`
    : params.ledger !== undefined && !rollout.ledgers[params.ledger - 1] ? `no ledger ${params.ledger}: it has ${rollout.ledgers.length}`
    : params.token !== undefined && !tokens[Number(params.token)] ? `no token ${params.token} in this ledger: it has ${integer(tokens.length)}, and the first is 0` : null;
  return missing && el("p", { class: "notice small", role: "alert" }, `This rollout has ${missing}.`);
}

/** The question, outcome, reward and facts of a rollout, and links to its siblings. */
function header(run, rollout, modeParams) {
  const row = rollout.row, ended = row.stop.replaceAll("_", " ");
  const verdict = row.success === 1 ? ["ok", "succeeded"] : row.success === 0 ? ["error", "failed"] : ["cancelled", rollout.infrastructure ? "not scored" : "no verdict"];
  const fact = (label, ...value) => el("div", {}, el("dt", { class: "label" }, label), el("dd", {}, value));
  const parts = Object.entries(rollout.rewards);
  return el("header", { class: "top stack" },
    el("div", { class: "row between" }, el("h1", { class: "question" }, row.question || rollout.task),
      el("div", { class: "score-summary" }, el("b", { class: "number" }, number(row.reward, 3)), el("span", { class: "chip", data: { outcome: verdict[0] } }, verdict[1]))),
    el("dl", { class: "about" }, fact("Task", el("span", { class: "mono" }, rollout.task)),
      row.kind ? fact("Kind", el("a", { href: linkTo(run.name, "rollouts", null, { kind: row.kind }) }, row.kind)) : null,
      row.step === null ? null : fact("Step", el("a", { href: linkTo(run.name, "rollouts", null, { step: row.step }) }, row.step)),
      fact("Ended", ended), row.blame ? fact("Failure of", row.blame) : null,
      fact("Turns", row.turns), fact("Tokens", `${integer(row.tokens)}, ${integer(row.written)} generated`),
      row.asked ? fact("Cached", `${Math.round(row.cached / row.asked * 100)} %`) : null,
      parts.length > 1 ? fact("Reward", parts.map(([name, value]) => `${name} ${number(value, 3)}`).join(", ")) : null,
      Object.keys(rollout.infos?.drift ?? {}).length ? fact("Differs from the chat template", Object.entries(rollout.infos.drift).map(([name, times]) => `${times} ${name}`).join(", ")) : null),
    rollout.reason ? el("p", { class: "notice small" }, rollout.reason) : null,
    rollout.siblings.length > 1 ? el("nav", { class: "siblings row centre", "aria-label": "Siblings" }, el("span", { class: "label" }, "Siblings"),
      rollout.siblings.map(other => el("a", { class: "sibling number", href: linkTo(run.name, "rollout", other.place, modeParams()), "aria-current": other.place === row.place ? "true" : null,
        title: `attempt ${other.index}: reward ${number(other.reward, 3)}, ${other.stop}`, data: { success: other.success === 1 ? "yes" : other.success === 0 ? "no" : "none" } }, number(other.reward, 2))),
      el("a", { class: "small", href: linkTo(run.name, "group", rollout.group) }, "side by side")) : null);
}

const NAMES = { queueing: "queueing", generating: "generating", calling: "calls", interacting: "feedback" };

function timeline(rollout, open) {
  const spans = rollout.timeline ?? [];
  if (!spans.length) return totalsByPhase(rollout);
  const end = Math.max(...spans.map(([, start, spent]) => start + spent), 1e-9);
  let turn = -1;
  const calls = rollout.ledgers.flatMap(ledger => ledger.entries.filter(entry => entry.author === "policy"));
  const nodes = spans.map(([phase, start, spent]) => {
    if (phase === "queueing" && (turn < 0 || spans.length)) turn += 1;
    const index = Math.max(0, turn), timedCalls = phase === "calling" ? (calls[index]?.calls ?? []).filter(call => call.elapsed_s) : [];
    const label = phase === "calling" && timedCalls.length ? timedCalls.map(call => `${call.name} ${seconds(call.elapsed_s)}`).join(", ") : NAMES[phase] ?? phase;
    return el("button", { class: "span", data: { phase }, style: { left: `${start / end * 100}%`, width: `${spent / end * 100}%` },
      title: `turn ${index}, ${label}: ${seconds(spent)}`, "aria-label": `turn ${index}, ${label}: ${seconds(spent)}`, tabindex: spent / end > .01 ? 0 : -1, on: { click: () => open(index) } },
      timedCalls.map(call => el("i", { class: "inner", data: { outcome: call.outcome }, style: { width: `${Math.min(100, call.elapsed_s / (spent || 1) * 100)}%` } })));
  });
  return el("section", { class: "timeline", "aria-label": "Time" }, el("div", { class: "track" }, nodes), phaseLegend(rollout, end));
}
function phaseLegend(rollout, end) {
  const totals = {};
  for (const [phase, , spent] of rollout.timeline ?? []) totals[phase] = (totals[phase] ?? 0) + spent;
  const sums = Object.entries(rollout.timeline?.length ? totals : rollout.timing ?? {});
  return el("ul", { class: "legend" }, el("li", {}, el("b", { class: "number" }, seconds(end))),
    sums.map(([phase, spent]) => el("li", {}, el("i", { class: "swatch", data: { phase } }), NAMES[phase] ?? phase, " ", el("span", { class: "number dim" }, seconds(spent)))));
}
/** Total times by phase, for runs without a timeline. */
function totalsByPhase(rollout) {
  const sums = Object.entries(rollout.timing ?? {}), all = sums.reduce((sum, [, value]) => sum + value, 0);
  if (!all) return null;
  let start = 0;
  const nodes = sums.map(([phase, spent]) => { const left = start; start += spent; return el("span", { class: "span", data: { phase }, style: { left: `${left / all * 100}%`, width: `${spent / all * 100}%` } }); });
  return el("section", { class: "timeline", "aria-label": "Time, by phase" }, el("div", { class: "track" }, nodes), phaseLegend(rollout, all));
}
const STILL_FRAMES = 4, MAX_FRAMES = 120; // frames without a move that end it, and frames at most
let lastScroll = 0;

/** Scrolls a node to the "start" or "center" of the window; nowhere if it is not drawn yet. */
function scrollIntoPlace(node, block) {
  const call = lastScroll += 1;
  let top = NaN, still = 0, framesLeft = MAX_FRAMES;
  const check = () => {
    if (call !== lastScroll || !node?.isConnected) return;
    const now = node.getBoundingClientRect().top;
    still = Math.abs(now - top) < 1 ? still + 1 : 0;
    if (!still) node.scrollIntoView({ block });
    top = node.getBoundingClientRect().top;
    framesLeft -= 1;
    if (framesLeft && still < STILL_FRAMES) requestAnimationFrame(check);
  };
  check();
}
