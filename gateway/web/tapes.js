// The tapes view: the recorded tapes, and the calls and results on one.
import { fetchJson, bytes, count, el, number, put, seconds, integer } from "./dom.js";
import { argumentsText, fold, partView } from "./result.js";
import { outcomeChip } from "./call_charts.js";

/** Longer texts are collapsed. */
const SHORT = 160;

export function tapes(state, [wanted]) {
  const list = el("ul", { class: "list" }), detail = el("div", { class: "stack wide detail" });
  const node = el("div", { class: "sides", data: { chosen: wanted ? "yes" : "no" } }, el("aside", { class: "stack" }, el("h2", {}, "Tapes"), el("nav", { "aria-label": "Tapes" }, list)), detail);
  const fail = error => put(detail, el("div", { class: "notice", data: { outcome: "error" } }, el("p", {}, error.message), error.remedy ? el("p", { class: "remedy" }, error.remedy) : null));
  const show = async () => {
    const { data } = await fetchJson("v1/tapes");
    put(list, data.map(one => el("li", {}, el("a", { class: "item", href: `#/tapes/${encodeURIComponent(one.name)}`, "aria-current": one.name === wanted ? "true" : null },
      el("code", { class: "field-name" }, one.name), el("span", { class: "dim tiny number" }, `${bytes(one.lines_bytes)}, ${new Date(one.changed_at * 1000).toLocaleString("en-GB")}`)))));
    if (!data.length) put(detail, el("div", { class: "empty" }, el("p", {}, "There are no tapes. ", el("code", {}, "mtrl-gateway serve --record tapes/first"), " records one: all calls and results, which can be replayed without any server.")));
    else if (!wanted) put(detail, el("div", { class: "empty" }, el("p", {}, "Select a tape to see its contents.")));
    else await read(wanted, 0);
  };
  const read = async (name, from) => {
    const tape = await fetchJson(`v1/tapes/${encodeURIComponent(name)}?from=${from}`);
    if (name !== wanted) return;
    if (!from) put(detail, head(tape), el("div", { class: "stack sessions" }));
    const place = detail.querySelector(".sessions");
    place.append(...tape.sessions.map(session));
    const next = from + tape.sessions.length;
    if (next < tape.summary.sessions) {
      const more = el("button", { type: "button", on: { click: () => { more.remove(); read(name, next).catch(fail); } } }, `More of ${count(tape.summary.sessions, "session")}`);
      place.append(el("div", {}, more));
    }
  };
  show().catch(fail);
  return { node, go: rest => { [wanted] = rest; node.dataset.chosen = wanted ? "yes" : "no"; put(detail); show().catch(fail); } };
}

function head({ name, summary }) {
  const facts = [["sessions", summary.sessions], ["completely recorded", summary.closed], ["calls", Object.values(summary.tools).reduce((a, b) => a + b, 0)],
    ["feedback turns", summary.feedback], ["media", summary.blobs]];
  return el("header", { class: "stack" }, el("a", { class: "back small", href: "#/tapes" }, "← All tapes"), el("h2", { class: "mono" }, name),
    el("dl", { class: "facts" }, facts.map(([words, value]) => el("div", {}, el("dt", { class: "label" }, words), el("dd", { class: "number" }, integer(value)))),
      el("div", {}, el("dt", { class: "label" }, "size"), el("dd", { class: "number" }, bytes(summary.bytes)))),
    el("p", { class: "small dim" }, `Recorded by mtrl ${summary.mtrl}. `, Object.entries(summary.tools).map(([tool, calls]) => `${tool} ${calls}`).join(", ")),
    summary.torn ? el("div", { class: "notice small", data: { outcome: "timeout" } }, "The recording stopped in the middle of the last line, which is left out.") : null);
}

function session(one) {
  return el("details", { class: "panel" }, el("summary", { class: "row centre" }, el("span", { class: "field-name" }, one.task_id || `Session ${one.session}`),
      el("span", { class: "dim small" }, count(one.entries.filter(({ kind }) => kind === "call").length, "call"), one.feedback ? ` · ${one.feedback}` : "", one.closed ? "" : " · incomplete")),
    el("ol", { class: "stack turns" }, one.entries.map(entry), one.more ? el("li", { class: "dim small" }, `and ${count(one.more, "more line")}`) : null));
}

function entry(one) {
  const author = one.kind === "feedback" ? "feedback" : "tool";
  if (one.kind === "finish") return el("li", { class: "small dim" }, "the end", Object.entries(one.rewards ?? {}).map(([tool, value]) => ` · ${tool} ${number(value)}`));
  const short = one.arguments.length <= SHORT, text = one.parts.map(part => part.text).join("");
  return el("li", { class: "turn stack", data: { author } }, el("div", { class: "row centre small" },
      el("code", { class: "field-name" }, one.kind === "feedback" ? "feedback" : one.name),
      short ? el("code", {}, one.arguments) : null, one.outcome ? outcomeChip(one.outcome) : null,
      one.elapsed_s ? el("span", { class: "dim number" }, seconds(one.elapsed_s)) : null, one.score !== null ? el("span", { class: "dim" }, `score ${number(one.score)}`) : null),
    short ? null : el("pre", { class: "wrap" }, argumentsText(one.arguments)), one.refused ? el("p", { class: "small" }, one.refused) : null,
    text.length <= SHORT ? one.parts.map(partView) : fold(text.split("\n")[0].slice(0, 80), one.parts.map(partView)));
}
