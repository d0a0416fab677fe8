// The tools view: search, description and schema of each tool, and the "Try it" panel.
import { count, el, put } from "./dom.js";
import { copyButton, fold, pretty } from "./result.js";
import { closeSessions, tryTool } from "./try_tool.js";
import { serverLink, serverOf } from "./servers.js";
import { atMost, outcomeBar } from "./call_charts.js";
import { quantile } from "./metrics.js";
import { schemaView } from "./schema.js";

export function tools(state, [wanted]) {
  const list = el("div", { class: "groups" }), summary = el("p", { class: "dim tiny", role: "status" }), detail = el("div", { class: "stack wide detail" });
  const search = el("input", { type: "search", id: "search", placeholder: "Search tools", "aria-label": "Search tools", autocomplete: "off" });
  const node = el("div", { class: "sides", data: { chosen: wanted ? "yes" : "no" } },
    el("aside", { class: "stack" }, search, summary, el("nav", { "aria-label": "Tools" }, list)), detail);
  let shown = null, listed = null;

  const draw = () => {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const found = state.tools.filter(tool => words.every(word => `${tool.name} ${tool.description} ${tool.owner}`.toLowerCase().includes(word)));
    const groups = new Map();
    for (const tool of found) groups.set(groupOf(tool), [...groups.get(groupOf(tool)) ?? [], tool]);
    put(list, [...groups].sort(byGroup).map(([group, members]) => el("section", { class: "group", "aria-label": `${group || IN_PROCESS}, ${count(members.length, "tool")}` },
      el("h2", { class: "label row between" }, group ? el("a", { class: "plain", href: serverLink(group) }, group) : IN_PROCESS, el("span", { class: "number" }, String(members.length))),
      el("ul", { class: "list" }, members.map(item)))),
      found.length ? null : el("p", { class: "dim small" }, state.tools.length ? "No tool matches." : "No tool is offered."));
    summary.textContent = words.length ? `${count(found.length, "tool")} of ${state.tools.length}` : "";
  };
  const item = tool => el("li", {}, el("a", { href: `#/tools/${encodeURIComponent(tool.name)}`, class: "item",
        "aria-current": tool.name === wanted ? "true" : null },
      el("code", { class: "field-name" }, tool.name), el("span", { class: "dim tiny line" }, firstLine(tool))));
  const update = () => {
    if (listed !== state.tools) draw();
    listed = state.tools;
    const tool = state.tools.find(one => one.name === wanted);
    // Keep a form that is being filled in, unless the tool has changed.
    if (JSON.stringify(tool) === shown) return;
    shown = JSON.stringify(tool);
    put(detail, tool ? toolView(tool, state) : empty(wanted, state));
  };
  const step = by => {
    const links = [...list.querySelectorAll("a.item")], at = links.findIndex(link => link.hash === location.hash);
    const next = links[Math.min(links.length - 1, Math.max(0, at + by))];
    if (next) { location.hash = next.hash; }
  };
  search.addEventListener("input", draw);
  search.addEventListener("keydown", event => { if (event.key === "Enter") { const first = list.querySelector("a.item"); if (first) location.hash = first.hash; } });
  update();
  return { node, update, leave: closeSessions, keys: { j: () => step(1), k: () => step(-1), "/": () => search.focus() },
    // Selecting another tool keeps the search.
    go: rest => { if (rest[0] !== wanted) closeSessions(); [wanted] = rest; node.dataset.chosen = wanted ? "yes" : "no"; draw(); update(); list.querySelector("[aria-current]")?.scrollIntoView({ block: "nearest" }); } };
}

const IN_PROCESS = "in this process";
/** The server of a tool, or "" for native tools, which stand first. */
const groupOf = tool => serverOf(tool) ?? "";
const byGroup = ([a], [b]) => a < b ? -1 : a > b ? 1 : 0;
const firstLine = tool => (tool.description || tool.hints.title || "").trim().split("\n")[0];

function empty(wanted, state) {
  return el("div", { class: "empty" }, el("p", {}, wanted ? `There is no tool ${wanted}.`
    : state.tools.length ? "Select a tool to see its parameters and try it." : "No tool is offered. Add one to tool_configs/ or mcp_servers.json."));
}

function toolView(tool, state) {
  const stats = state.stats.get(tool.name), { hints } = tool;
  const tags = [tool.audience === "loop" && "for the training loop", hints.pure && "pure", hints.read_only && "read only",
    hints.idempotent && "idempotent", hints.destructive && "destructive", hints.open_world && "open world"].filter(Boolean);
  return [
    el("header", { class: "stack" },
      el("a", { class: "back small", href: "#/tools" }, "← All tools"),
      el("h2", { class: "mono" }, tool.name),
      el("p", { class: "row small dim" }, hints.title ? el("span", {}, hints.title) : null, serverOf(tool) === null ? el("span", {}, tool.owner) : el("span", {}, "from server ", el("a", { class: "plain", href: serverLink(serverOf(tool)) }, serverOf(tool))), tags.map(tag => el("span", { class: "tag" }, tag))),
      tool.description ? el("p", { class: "description" }, tool.description) : null,
      stats?.calls ? el("div", { class: "row centre small dim number" }, count(stats.calls, "call"), outcomeBar(stats.outcomes),
        `median at most ${atMost(quantile(stats.bins, .5))}`) : null),
    el("div", { class: "halves" },
      el("section", { class: "stack" }, el("h3", {}, "Parameters"), schemaView(tool.parameters, tool.parameters),
        fold("Schema as JSON", pretty(tool.parameters), copyButton(() => JSON.stringify(tool.parameters, null, 2))),
        tool.output ? fold("Output schema as JSON", pretty(tool.output)) : null),
      el("section", { class: "panel" }, tryTool(tool)))];
}
