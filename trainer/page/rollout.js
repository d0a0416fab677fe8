// One rollout: the conversation as a person reads it, beside it the ledger, entry by entry; above both, where its time went.

import { $, $$, count, el, number, put, seconds, whole } from "./dom.js";
import { bring } from "./bring.js";
import { rollout } from "./data.js";
import { MODES, legend, paint, scaled, told, tokens } from "./ledger.js";
import { pieces } from "./pieces.js";
import { link, note } from "./place.js";
import { cameFrom, neighbour } from "./table.js";
import { entry as speech } from "./speech.js";
import { strip } from "./strip.js";

const chosen = { mode: "author" }; // stays from rollout to rollout

export async function view({ frame, run, here }) {
  const one = await rollout(run.name, Number(here.which));
  const holding = turn => one.ledgers.findIndex(({ entries }) => entries.some(entry => entry.author === "policy" && entry.turn === turn));
  let ledger = begins(one, here.asked, holding), all = [], scale = null, current = null, pinned = null;
  if (here.asked.by && MODES.some(([name]) => name === here.asked.by)) chosen.mode = here.asked.by;

  const body = el("div", { class: "entries" }), inspector = el("aside", { class: "inspector", "aria-live": "polite", "aria-label": "Token" });
  const key = el("div", { class: "key" });
  const modes = el("div", { class: "modes", role: "radiogroup", "aria-label": "Colour tokens by" }, MODES.map(([name, title], place) =>
    el("button", { class: "mode", role: "radio", "aria-checked": String(name === chosen.mode), data: { mode: name }, title: `${title} (${place + 1})`, on: { click: () => recolour(name) } }, title)));

  const drawn = pieces((node, list) => paint(run.name, node, list, chosen.mode, scale));
  function recolour(mode) {
    chosen.mode = mode;
    $$(".mode", modes).forEach(node => node.setAttribute("aria-checked", String(node.dataset.mode === mode)));
    drawn.again();
    put(key, legend(mode, all));
    note({ by: mode === "author" ? "" : mode });
    mark();
  }
  function fill() {
    all = tokens(one.ledgers[ledger]);
    scale = scaled(all);
    drawn.clear();
    const of = Map.groupBy(all, token => token.entry);
    put(body, one.ledgers[ledger].entries.map(entry => el("section", { class: "entry", data: { author: entry.author, turn: entry.author === "policy" ? entry.turn : null } },
      speech(run, entry), el("div", { class: "side" },
        entry.ids?.length ? drawn.fill(el("p", { class: "ids mono" }), of.get(entry)) : el("p", { class: "dim small" }, "no tokens: the policy never read this"),
        el("p", { class: "dim tiny number" }, entry.ids?.length ? `tokens ${entry.start}–${entry.start + entry.ids.length - 1}` : "", entry.version !== undefined ? ` · version ${entry.version}` : "", entry.author === "policy" ? ` · cached ${whole(entry.cached ?? 0)} of ${whole(entry.seen)}` : "", entry.stop === "length" ? " · cut off at its length" : entry.stop === "abort" ? " · the engine was told to stop" : "")))));
    recolour(chosen.mode);
  }
  function mark() {
    $$(".t.on", body).forEach(node => node.classList.remove("on"));
    const token = pinned ?? current;
    if (token === null) return put(inspector, el("p", { class: "dim" }, "Point at a token, or walk with ", el("kbd", {}, "←"), " ", el("kbd", {}, "→"), ": what it was worth, and why it is (not) trained."));
    $(`#t${token.at}`, body)?.classList.add("on");
    put(inspector, told(token, one), pinned ? el("button", { class: "quiet shut", "aria-label": "Let go of the token", on: { click: () => pin(null) } }, "×") : null);
  }
  function pin(token, move = true) {
    pinned = token;
    say({ token: token ? token.at : "" });
    if (token) drawn.show(token);
    mark();
    if (token && move) bring($(`#t${token.at}`, body), "center");
  }
  const say = asked => note({ token: "", turn: "", ledger: one.ledgers.length > 1 ? ledger + 1 : "", ...asked });
  function open(place) {
    ledger = place;
    pinned = current = null;
    $$("button", anew).forEach((node, at) => node.setAttribute("aria-pressed", String(at === place)));
    fill();
    say({});
  }
  const anew = el("div", { class: "row centre" }, el("span", { class: "label" }, "The policy began anew; ledger"), one.ledgers.map((_, place) =>
    el("button", { class: "mode", "aria-pressed": String(place === ledger), on: { click: () => open(place) } }, place + 1)));
  const find = event => { const node = event.target.closest?.(".t"); return node ? all[Number(node.dataset.at)] : null; };
  body.addEventListener("pointerover", event => { const token = find(event); if (token !== current) { current = token; mark(); } });
  body.addEventListener("pointerleave", () => { current = null; mark(); });
  body.addEventListener("click", event => { const token = find(event); if (token && getSelection().isCollapsed) pin(token === pinned ? null : token, false); });

  function toTurn(turn) {
    const place = holding(turn);
    if (place < 0) return;
    if (place !== ledger) open(place);
    bring($(`.entry[data-turn="${turn}"]`, body), "start");
    say({ turn });
  }
  /** The next turn, or the one before, of what is now at the top. */
  function turnBy(way) {
    const off = node => node.getBoundingClientRect().top - parseFloat(getComputedStyle(node).scrollMarginTop);
    const near = $$(".entry[data-turn]", body), next = way > 0 ? near.find(node => off(node) > 4) : near.findLast(node => off(node) < -4);
    if (next) toTurn(Number(next.dataset.turn));
  }
  function step(way) {
    if (!all.length) return;
    const from = pinned ? pinned.at + way : way > 0 ? 0 : all.length - 1;
    if (all[from]) pin(all[from]);
  }
  async function go(way) { const place = await neighbour(run.name, Number(here.which), way); if (place !== null) location.hash = link(run.name, "rollout", place, by()); }
  const by = () => chosen.mode === "author" ? {} : { by: chosen.mode };
  const beside = way => { const at = one.siblings.findIndex(other => other.place === Number(here.which)), next = one.siblings[at + way]; if (next) location.hash = link(run.name, "rollout", next.place, by()); };
  const unfold = () => { const folded = $$("details.fold", body), open = folded.some(node => !node.open); folded.forEach(node => { node.open = open; }); };

  fill();
  put(frame, top(run, one, by), strip(one, toTurn),
    one.silent ? el("p", { class: "notice small" }, `Tokens are shown as ids: ${one.silent}.`) : null,
    one.ledgers.length > 1 ? anew : null, nowhere(one, here.asked, holding, ledger, all),
    el("div", { class: "panel flush both" }, el("div", { class: "heads" }, el("h2", {}, "Conversation"), el("div", { class: "row centre between" }, el("h2", {}, "Ledger"), modes, key)), body, inspector));
  requestAnimationFrame(() => {
    if (!frame.isConnected) return;
    const token = all[Number(here.asked.token)];
    if (token) pin(token);
    else if (here.asked.turn !== undefined) toTurn(Number(here.asked.turn));
  });
  const numbers = Object.fromEntries(MODES.map(([name], place) => [String(place + 1), () => recolour(name)]));
  return { title: `Rollout ${here.which} of ${run.name}`, leave: drawn.clear, acts: { ...numbers, j: () => go(1), k: () => go(-1), "]": () => beside(1), "[": () => beside(-1),
    n: () => turnBy(1), p: () => turnBy(-1), r: unfold, c: () => { location.hash = link(run.name, "group", one.group); },
    ArrowRight: () => step(1), ArrowLeft: () => step(-1), Escape: () => { if (pinned) pin(null); else location.hash = cameFrom(run.name); } } };
}

/** The ledger that is meant: a turn is in one alone. */
function begins(one, asked, holding) {
  const last = one.ledgers.length - 1;
  if (asked.turn !== undefined && holding(Number(asked.turn)) >= 0) return holding(Number(asked.turn));
  return one.ledgers[asked.ledger - 1] ? asked.ledger - 1 : last;
}
/** What an address names and the rollout has not. */
function nowhere(one, asked, holding, ledger, all) {
  const said = asked.turn !== undefined && holding(Number(asked.turn)) < 0 ? `no turn ${asked.turn}: it has ${count(one.row.turns, "turn")}, and the first is 0`
    : asked.ledger !== undefined && !one.ledgers[asked.ledger - 1] ? `no ledger ${asked.ledger}: it has ${one.ledgers.length}`
    : asked.token !== undefined && !all[Number(asked.token)] ? `no token ${asked.token} in this ledger: it has ${whole(all.length)}, and the first is 0` : null;
  return said && el("p", { class: "notice small", role: "alert" }, `This rollout has ${said}.`);
}

/** What it was about, how it ended, what it was worth, and its siblings. */
function top(run, one, by) {
  const row = one.row, ended = row.stop.replaceAll("_", " ");
  const verdict = row.success === 1 ? ["ok", "succeeded"] : row.success === 0 ? ["error", "failed"] : ["cancelled", one.infrastructure ? "not scored" : "no verdict"];
  const fact = (label, ...value) => el("div", {}, el("dt", { class: "label" }, label), el("dd", {}, value));
  const parts = Object.entries(one.rewards);
  return el("header", { class: "top stack" },
    el("div", { class: "row between" }, el("h1", { class: "asked" }, row.question || one.task),
      el("div", { class: "worth" }, el("b", { class: "number" }, number(row.reward, 3)), el("span", { class: "chip", data: { outcome: verdict[0] } }, verdict[1]))),
    el("dl", { class: "about" }, fact("Task", el("span", { class: "mono" }, one.task)),
      row.kind ? fact("Kind", el("a", { href: link(run.name, "rollouts", null, { kind: row.kind }) }, row.kind)) : null,
      row.step === null ? null : fact("Step", el("a", { href: link(run.name, "rollouts", null, { step: row.step }) }, row.step)),
      fact("Ended", ended), row.blame ? fact("Failure of", row.blame) : null,
      fact("Turns", row.turns), fact("Tokens", `${whole(row.tokens)}, ${whole(row.written)} written`),
      row.asked ? fact("Cached", `${Math.round(row.cached / row.asked * 100)} %`) : null,
      parts.length > 1 ? fact("Reward", parts.map(([name, value]) => `${name} ${number(value, 3)}`).join(", ")) : null,
      Object.keys(one.infos?.drift ?? {}).length ? fact("Differs from the template", Object.entries(one.infos.drift).map(([name, many]) => `${many} ${name}`).join(", ")) : null),
    one.reason ? el("p", { class: "notice small" }, one.reason) : null,
    one.siblings.length > 1 ? el("nav", { class: "siblings row centre", "aria-label": "Siblings" }, el("span", { class: "label" }, "Siblings"),
      one.siblings.map(other => el("a", { class: "sibling number", href: link(run.name, "rollout", other.place, by()), "aria-current": other.place === row.place ? "true" : null,
        title: `attempt ${other.index}: reward ${number(other.reward, 3)}, ${other.stop}`, data: { success: other.success === 1 ? "yes" : other.success === 0 ? "no" : "none" } }, number(other.reward, 2))),
      el("a", { class: "small", href: link(run.name, "group", one.group) }, "side by side")) : null);
}
