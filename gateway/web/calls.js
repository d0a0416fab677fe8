// The calls view: running calls, and finished ones with the newest on top.
import { clock, count, el, streamLines, put, seconds } from "./dom.js";
import { argumentsText, partView } from "./result.js";
import { MEANING, operatorNote, OUTCOMES, outcomeChip, phaseStrip, rewardText } from "./call_charts.js";

const KEPT = 300;
const AGAIN_MS = 2000;

export function calls(state, [wanted]) {
  const search = el("input", { type: "search", id: "search", placeholder: "Tool, arguments, text, session", "aria-label": "Filter calls",
    autocomplete: "off", class: "grow", value: wanted ?? "" });
  const which = el("select", { "aria-label": "Outcome", class: "narrow" }, el("option", { value: "" }, "Any outcome"),
    OUTCOMES.map(name => el("option", { value: name }, name)));
  const hold = el("button", { type: "button", "aria-pressed": "false" }, "Pause");
  const running = el("div", { class: "stack" }), body = el("tbody", {}), none = el("div", { class: "empty" });
  const table = el("div", { class: "panel flush" }, el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Calls that have ended" },
    el("table", { class: "calls" }, el("thead", {}, el("tr", {}, [["Ended", "tight"], ["Tool"], ["Outcome", "tight"], ["Took", "number tight"], ["Session", "tight spare"], ["Arguments", "spare"]]
      .map(([words, kind]) => el("th", { scope: "col", class: kind }, words)))), body)), none);
  const statusLine = el("p", { class: "dim small", role: "status" }, "connecting");
  const node = el("div", { class: "stack" }, el("div", { class: "row between" }, el("h2", {}, "Calls"), statusLine),
    el("div", { class: "row centre" }, search, which, hold), running, table);
  const stop = new AbortController();
  let seen = [], waiting = [], missed = 0;

  const matches = call => (!which.value || call.outcome === which.value) && search.value.toLowerCase().split(/\s+/).every(word =>
    [call.tool, call.session, call.arguments, call.reason ?? "", ...call.parts.map(part => part.text ?? "")].some(text => text.toLowerCase().includes(word)));
  const say = () => put(statusLine, hold.ariaPressed === "true" ? `paused, ${waiting.length} more since` : `live, ${count(seen.length, "call")}${missed ? `, ${missed} missed` : ""}`);
  const blank = () => {
    put(none, body.firstChild ? null : el("p", {}, seen.length ? "No call matches the filter." : "No call has ended yet. Calls of rollouts and clients appear here as they end."));
    none.hidden = Boolean(body.firstChild);
  };
  const draw = () => { put(body, seen.filter(matches).map(row)); blank(); say(); };
  const add = call => {
    missed += call.missed ?? 0;
    if (hold.ariaPressed === "true") { waiting.unshift(call); waiting.length = Math.min(waiting.length, KEPT); return say(); }
    seen.unshift(call);
    seen.length = Math.min(seen.length, KEPT);
    if (matches(call)) body.prepend(...row(call));
    // Each call has two rows: its summary, and the details that it expands to.
    while (body.childElementCount > 2 * KEPT) body.lastChild.remove();
    blank();
    say();
  };
  const hear = line => {
    if (line.call) add(line.call);
    if (line.running) put(running, line.running.length ? el("ul", { class: "panel running" }, line.running.map(one =>
      el("li", { class: "row centre small" }, el("span", { class: "dot waiting" }), el("code", { class: "field-name" }, one.tool),
        el("span", { class: "dim number" }, `runs for ${seconds(one.for_s)}`), el("code", { class: "dim" }, one.session.slice(0, 8))))) : null);
  };
  (async () => {
    while (!stop.signal.aborted) {
      seen = [];
      draw();
      try { await streamLines("v1/live/calls", hear, { signal: stop.signal }); } catch (error) { if (error.name === "AbortError") return; }
      put(statusLine, "The gateway does not answer; retrying.");
      await new Promise(resolve => setTimeout(resolve, AGAIN_MS));
    }
  })();
  search.addEventListener("input", draw);
  which.addEventListener("change", draw);
  hold.addEventListener("click", () => {
    hold.ariaPressed = String(hold.ariaPressed !== "true");
    hold.textContent = hold.ariaPressed === "true" ? "Go on" : "Pause";
    seen = [...waiting, ...seen].slice(0, KEPT);
    waiting = [];
    draw();
  });
  return { node, leave: () => stop.abort(), keys: { "/": () => search.focus(), p: () => hold.click(),
    j: () => step(body, 1), k: () => step(body, -1) } };
}

function step(body, by) {
  const rows = [...body.querySelectorAll(".opener")], at = rows.indexOf(document.activeElement);
  rows[Math.min(rows.length - 1, Math.max(0, at + by))]?.focus();
}

function row(call) {
  const more = el("tr", { class: "more", hidden: true });
  const act = () => {
    more.hidden = !more.hidden;
    opener.setAttribute("aria-expanded", String(!more.hidden));
    if (!more.firstChild) put(more, el("td", { colspan: 6 }, detail(call)));
  };
  const opener = el("button", { type: "button", class: "opener", "aria-expanded": "false" }, el("code", { class: "field-name" }, call.tool));
  const head = el("tr", { class: "pick", on: { click: act } }, // the opener's clicks arrive here, too
    el("td", { class: "tight dim" }, clock(call.at)), el("td", {}, opener), el("td", {}, outcomeChip(call.outcome)),
    el("td", { class: "number" }, seconds(call.elapsed_s)), el("td", { class: "spare" }, el("code", { class: "dim" }, call.session.slice(0, 8))),
    el("td", { class: "cut mono rest spare" }, call.arguments.slice(0, 200)));
  return [head, more];
}

function detail(call) {
  return el("div", { class: "halves" },
    el("div", { class: "stack" }, el("p", { class: "label" }, "Arguments"), el("pre", { class: "wrap" }, argumentsText(call.arguments)),
      phaseStrip(call.timing, call.elapsed_s)),
    el("div", { class: "stack" }, el("p", { class: "label" }, "Answer"),
      call.outcome === "ok" ? null : el("div", { class: "notice small", data: { outcome: call.outcome } }, el("p", {}, MEANING[call.outcome]), operatorNote(call)),
      call.parts.map(partView), el("p", { class: "row tiny dim" }, el("span", {}, "session ", el("code", {}, call.session.slice(0, 8))), rewardText(call.reward), call.attempts > 1 ? count(call.attempts, "attempt") : null,
        call.known ? el("a", { href: `#/tools/${encodeURIComponent(call.tool)}` }, "Open the tool") : null)));
}
