// How the gateway is: what is wrong first, with its remedy; then how each tool has done.
import { count, el, percent, put, whole } from "./dom.js";
import { atMost, latencyBars, outcomeBar } from "./marks.js";
import { within } from "./metrics.js";

const SAID = { up: "up", connecting: "connecting", down: "down", stale: "down; what it last listed is still offered" };
const RANK = { down: 0, stale: 1, connecting: 2, up: 3 };

export function overview(state) {
  const servers = el("div", { class: "panel flush" }), table = el("div", { class: "panel flush" }), aside = el("div", { class: "stack" });
  const facts = el("p", { class: "dim small number" });
  const node = el("div", { class: "stack wide" },
    el("section", { class: "stack" }, el("div", { class: "row between" }, el("h2", {}, "Servers"), facts), servers, aside),
    el("section", { class: "stack" }, el("div", { class: "row between" }, el("h2", {}, "How tools have done"),
      el("p", { class: "dim small" }, "since the gateway started")), table));
  const body = el("tbody", {}), scroll = performance(body);
  const none = el("div", { class: "empty" }, el("p", {}, "No tool has been called yet. ", el("a", { href: "#/tools" }, "Try one.")));
  let drawn = "";
  const update = () => {
    const now = JSON.stringify([state.health, [...state.stats], state.tools.length]);
    if (now === drawn) return;
    drawn = now;
    const held = node.contains(document.activeElement) ? document.activeElement.getAttribute("href") : null;
    const health = state.health ?? {}, found = Object.entries(health.servers ?? {});
    put(facts, health.sessions === undefined ? "" : `${count(health.tools, "tool")}, ${count(health.sessions, "open session")}`);
    put(servers, el("ul", { class: "servers" }, found.sort(([, a], [, b]) => RANK[a.state] - RANK[b.state]).map(server), native(state)));
    put(aside, Object.entries(health.set_aside ?? {}).map(([name, reason]) => el("div", { class: "notice small", data: { outcome: "invalid" } },
      el("p", {}, el("code", {}, name), ` is not offered: ${reason}`), el("p", { class: "remedy dim" }, "Mend its schema, or leave it out with `allow`."))));
    const all = rows(state);
    put(body, all);
    if (table.firstChild !== (all.length ? scroll : none)) put(table, all.length ? scroll : none);
    // Whoever stands on a link by keyboard stays there, whatever is drawn anew.
    if (held) [...node.querySelectorAll("a")].find(link => link.getAttribute("href") === held)?.focus();
  };
  update();
  return { node, update };
}

function server([name, one]) {
  const told = [one.transport, one.protocol && `MCP ${one.protocol}`, one.tools && count(one.tools, "tool"),
    one.reconnects && count(one.reconnects, "reconnect")].filter(Boolean).join(" · ");
  return el("li", { class: "server", data: { state: one.state } },
    el("div", { class: "row centre" }, el("span", { class: "dot" }), el("strong", {}, name),
      el("span", { class: "chip plain" }, SAID[one.state] ?? one.state), el("span", { class: "dim small" }, told)),
    one.state !== "up" && (one.reason || one.remedy) ? el("div", { class: "notice small" }, el("p", {}, one.reason),
      one.remedy ? el("p", { class: "remedy" }, one.remedy) : null) : null,
    Object.entries(one.quarantined).map(([tool, reason]) => el("p", { class: "small dim indented" }, el("code", {}, tool), ` is left out: ${reason}`)));
}

/** What needs no server. */
function native(state) {
  const mine = state.tools.filter(tool => !tool.owner.startsWith("mcp server"));
  if (!mine.length) return null;
  const owners = [...new Set(mine.map(tool => tool.owner.split("/").pop().split(" ")[0]).filter(Boolean))];
  return el("li", { class: "server", data: { state: "up" } }, el("div", { class: "row centre" }, el("span", { class: "dot" }),
    el("strong", {}, "in this process"), el("span", { class: "dim small" }, `${count(mine.length, "tool")} · ${owners.join(", ")}`)));
}

function performance(body) {
  return el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "How tools have done" }, el("table", {},
    el("thead", {}, el("tr", {}, [["Tool", "tight"], ["What it is for", "spare"], ["Calls", "number tight"], ["How they ended", "tight"],
      ["ok", "number tight"], ["Half within", "number tight"], ["95 % within", "number tight"], ["How long", "tight"]]
      .map(([words, kind]) => el("th", { scope: "col", class: kind }, words)))), body));
}

function rows(state) {
  const told = new Map(state.tools.map(tool => [tool.name, tool.description.trim().split("\n")[0]]));
  return [...state.stats].filter(([, one]) => one.calls).sort(([, a], [, b]) => b.calls - a.calls).map(([name, one]) => el("tr", {},
    el("td", {}, told.has(name) ? el("a", { class: "mono plain", href: `#/tools/${encodeURIComponent(name)}` }, name)
      : el("span", { class: "mono dim" }, name)),
    el("td", { class: "cut rest dim spare" }, told.get(name) ?? (name === "(unknown)" ? "names that no tool here has" : "")),
    el("td", { class: "number" }, whole(one.calls)), el("td", {}, outcomeBar(one.outcomes)),
    el("td", { class: "number" }, percent((one.outcomes.ok ?? 0) / one.calls)),
    el("td", { class: "number" }, atMost(within(one.bins, .5))), el("td", { class: "number" }, atMost(within(one.bins, .95))),
    el("td", {}, latencyBars(one.bins))));
}
