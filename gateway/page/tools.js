// Every tool: to be found, to be read, to be tried.
import { count, el, put } from "./dom.js";
import { copyButton, fold, pretty } from "./result.js";
import { attempt } from "./attempt.js";
import { atMost, latencyBars, outcomeBar } from "./marks.js";
import { within } from "./metrics.js";
import { readable } from "./schema.js";

export function tools(state, [wanted]) {
  const list = el("ul", { class: "list" }), detail = el("div", { class: "stack wide detail" });
  const search = el("input", { type: "search", id: "search", placeholder: "Search tools", "aria-label": "Search tools", autocomplete: "off" });
  const node = el("div", { class: "sides", data: { chosen: wanted ? "yes" : "no" } },
    el("aside", { class: "stack" }, search, el("nav", { "aria-label": "Tools" }, list)), detail);
  let shown = null, listed = null;

  const draw = () => {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const found = state.tools.filter(tool => words.every(word => `${tool.name} ${tool.description} ${tool.owner}`.toLowerCase().includes(word)));
    put(list, found.map(tool => el("li", {}, el("a", { href: `#/tools/${encodeURIComponent(tool.name)}`, class: "item",
        "aria-current": tool.name === wanted ? "true" : null },
      el("code", { class: "field-name" }, tool.name), el("span", { class: "dim tiny line" }, firstLine(tool))))),
      found.length ? null : el("li", { class: "dim small" }, state.tools.length ? "No tool has these words." : "No tool is offered."));
  };
  const update = () => {
    if (listed !== state.tools) draw();
    listed = state.tools;
    const tool = state.tools.find(one => one.name === wanted);
    // A form that somebody fills in stays, as long as the tool is what it was.
    if (JSON.stringify(tool) === shown) return;
    shown = JSON.stringify(tool);
    put(detail, tool ? about(tool, state) : empty(wanted, state));
  };
  const step = by => {
    const links = [...list.querySelectorAll("a")], at = links.findIndex(link => link.hash === location.hash);
    const next = links[Math.min(links.length - 1, Math.max(0, at + by))];
    if (next) { location.hash = next.hash; }
  };
  search.addEventListener("input", draw);
  search.addEventListener("keydown", event => { if (event.key === "Enter") { const first = list.querySelector("a"); if (first) location.hash = first.hash; } });
  update();
  return { node, update, keys: { j: () => step(1), k: () => step(-1), "/": () => search.focus() },
    // Choosing another tool keeps the search.
    go: rest => { [wanted] = rest; node.dataset.chosen = wanted ? "yes" : "no"; draw(); update(); list.querySelector("[aria-current]")?.scrollIntoView({ block: "nearest" }); } };
}

const firstLine = tool => (tool.description || tool.hints.title || "").trim().split("\n")[0];

function empty(wanted, state) {
  return el("div", { class: "empty" }, el("p", {}, wanted ? `There is no tool ${wanted}.`
    : state.tools.length ? "Choose a tool to read what it takes, and to try it." : "No tool is offered yet. Add one to tool_configs/ or mcp_servers.json."));
}

function about(tool, state) {
  const stats = state.stats.get(tool.name), { hints } = tool;
  const tags = [tool.audience === "loop" && "for the training loop", hints.pure && "pure", hints.read_only && "read only",
    hints.idempotent && "idempotent", hints.destructive && "destructive", hints.open_world && "open world"].filter(Boolean);
  return [
    el("header", { class: "stack" },
      el("a", { class: "back small", href: "#/tools" }, "← All tools"),
      el("h2", { class: "mono" }, tool.name),
      el("p", { class: "row small dim" }, hints.title ? el("span", {}, hints.title) : null, el("span", {}, tool.owner), tags.map(tag => el("span", { class: "tag" }, tag))),
      tool.description ? el("p", { class: "description" }, tool.description) : null,
      stats?.calls ? el("div", { class: "row centre small dim number" }, count(stats.calls, "call"), outcomeBar(stats.outcomes),
        latencyBars(stats.bins), `half within ${atMost(within(stats.bins, .5))}`) : null),
    el("div", { class: "halves" },
      el("section", { class: "stack" }, el("h3", {}, "What it takes"), readable(tool.parameters, tool.parameters),
        fold("Schema as JSON", pretty(tool.parameters), copyButton(() => JSON.stringify(tool.parameters, null, 2))),
        tool.output ? fold("What it promises to answer, as JSON", pretty(tool.output)) : null),
      el("section", { class: "panel" }, attempt(tool)))];
}
