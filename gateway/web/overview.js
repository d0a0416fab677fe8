// The overview: servers, those with problems first and with remedies, then the statistics of each tool.
import { clock, count, el, percent, put, integer } from "./dom.js";
import { atMost, outcomeBar } from "./call_charts.js";
import { quantile } from "./metrics.js";
import { STATE_LABELS, ranked, serverLink, serverOf } from "./servers.js";


export function overview(state) {
  const servers = el("div", { class: "panel flush" }), table = el("div", { class: "panel flush" }), aside = el("div", { class: "stack" });
  const facts = el("p", { class: "dim small number" }), refused = el("div", { role: "status" });
  const node = el("div", { class: "stack wide" }, refused,
    el("section", { class: "stack" }, el("div", { class: "row between" }, el("h2", {}, "Servers"), facts), servers, aside),
    el("section", { class: "stack" }, el("div", { class: "row between" }, el("h2", {}, "Tool statistics"),
      el("p", { class: "dim small" }, "since the gateway started")), table));
  const body = el("tbody", {}), scroll = performance(body);
  const none = el("div", { class: "empty" }, el("p", {}, "No tool has been called yet. ", el("a", { href: "#/tools" }, "Try one.")));
  let drawn = "";
  const update = () => {
    const now = JSON.stringify([state.health, [...state.stats], state.tools.length]);
    if (now === drawn) return;
    drawn = now;
    const held = node.contains(document.activeElement) ? document.activeElement.getAttribute("href") : null;
    const health = state.health ?? {};
    put(refused, refusalNotice(health.reload_refusal));
    put(facts, health.sessions === undefined ? "" : `${count(health.tools, "tool")}, ${count(health.sessions, "open session")}`);
    put(servers, el("ul", { class: "servers" }, ranked(health).map(server), native(state), sandboxes(health.sandboxes)));
    put(aside, notices(health.set_aside, "is not offered", "Fix its schema, or leave it out with `allow`.", health.clashes),
      notices(health.clashes, "has the name of another tool", "Give its server a `prefix`, leave it out with `allow`, or set `on_clash`."));
    const all = rows(state);
    put(body, all);
    if (table.firstChild !== (all.length ? scroll : none)) put(table, all.length ? scroll : none);
    // Keep the keyboard focus on the same link after redrawing.
    if (held) [...node.querySelectorAll("a")].find(link => link.getAttribute("href") === held)?.focus();
  };
  update();
  return { node, update };
}

function refusalNotice(refusal) {
  return refusal ? el("div", { class: "notice stack", data: { outcome: "error" } },
    el("p", {}, el("strong", {}, "The changed files are refused"), ` since ${clock(refusal.at)}; the configuration before them stays in use.`),
    el("pre", { class: "wrap", tabindex: "0", "aria-label": "Errors in the files" }, refusal.error),
    el("p", { class: "remedy small" }, "Correct the files: they are read again when they change.")) : null;
}

function notices(reasons, problem, remedy, except = {}) {
  return Object.entries(reasons ?? {}).filter(([name]) => !(name in except)).map(([name, reason]) =>
    el("div", { class: "notice small", data: { outcome: "invalid" } }, el("p", {}, el("code", {}, name), ` ${problem}: ${reason}`),
      el("p", { class: "remedy dim" }, remedy)));
}

function server([name, one]) {
  const details = [one.transport, one.protocol && `MCP ${one.protocol}`, one.tools && count(one.tools, "tool"),
    one.reconnects && count(one.reconnects, "reconnect"),
    one.cut && `cut ${count(one.cut, "time")} for a flood`].filter(Boolean).join(" · ");
  return el("li", { class: "server", data: { state: one.state } },
    el("div", { class: "row centre" }, el("span", { class: "dot" }), el("strong", {}, el("a", { class: "plain", href: serverLink(name) }, name)),
      el("span", { class: "chip plain" }, STATE_LABELS[one.state] ?? one.state), el("span", { class: "dim small" }, details)),
    one.state !== "up" && (one.reason || one.remedy) ? el("div", { class: "notice small" }, el("p", {}, one.reason),
      one.remedy ? el("p", { class: "remedy" }, one.remedy) : null) : null,
    one.state === "up" && one.last_loss ? el("p", { class: "small dim indented" }, `It has recovered. It was down because: ${one.last_loss}`) : null,
    Object.entries(one.quarantined).map(([tool, reason]) => el("p", { class: "small dim indented" }, el("code", {}, tool), ` is left out: ${reason}`)));
}

/** Native tools, which need no server. */
function native(state) {
  const mine = state.tools.filter(tool => serverOf(tool) === null);
  if (!mine.length) return null;
  const owners = [...new Set(mine.map(tool => tool.owner.split("/").pop().split(" ")[0]).filter(Boolean))];
  return el("li", { class: "server", data: { state: "up" } }, el("div", { class: "row centre" }, el("span", { class: "dot" }),
    el("strong", {}, "in this process"), el("span", { class: "dim small" }, `${count(mine.length, "tool")} · ${owners.join(", ")}`)));
}

/** Sandboxes, once one was started or refused: how long starts take, refusals, and the limits that were hit. */
function sandboxes(counts) {
  if (!counts?.starts && !counts?.refusals) return null;
  const mean = counts.starts ? `${integer(Math.round(1000 * counts.start_s / counts.starts))} ms to start` : "";
  const limits = Object.entries(counts.limits_hit).map(([limit, hits]) => `${limit} ${integer(hits)}`).join(", ");
  const details = [`${integer(counts.running)} running`, `${integer(counts.starts)} started`, mean, limits && `limits hit: ${limits}`];
  return el("li", { class: "server", data: { state: counts.refusals ? "down" : "up" } }, el("div", { class: "row centre" },
    el("span", { class: "dot" }), el("strong", {}, "sandboxes"), el("span", { class: "dim small" }, details.filter(Boolean).join(" · "))),
    counts.refusals ? el("div", { class: "notice small" }, el("p", {}, `${integer(counts.refusals)} could not be started.`),
      el("p", { class: "remedy" }, el("code", {}, "mtrl-gateway check"), " says what is missing.")) : null,
    counts.without_group ? el("p", { class: "small dim indented" },
      `${integer(counts.without_group)} had no control group: their limits hold for each process alone.`) : null);
}

function performance(body) {
  return el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Tool statistics" }, el("table", {},
    el("thead", {}, el("tr", {}, [["Tool", "tight"], ["Description", "spare"], ["Calls", "number tight"], ["Outcomes", "tight"],
      ["ok", "number tight"], ["Median ≤", "number tight"], ["95 % ≤", "number tight"]]
      .map(([words, kind]) => el("th", { scope: "col", class: kind }, words)))), body));
}

function rows(state) {
  const descriptions = new Map(state.tools.map(tool => [tool.name, tool.description.trim().split("\n")[0]]));
  return [...state.stats].filter(([, one]) => one.calls).sort(([, a], [, b]) => b.calls - a.calls).map(([name, one]) => el("tr", {},
    el("td", {}, descriptions.has(name) ? el("a", { class: "mono plain", href: `#/tools/${encodeURIComponent(name)}` }, name)
      : el("span", { class: "mono dim" }, name)),
    el("td", { class: "cut rest dim spare" }, descriptions.get(name) ?? (name === "(unknown)" ? "names of tools that don't exist" : "")),
    el("td", { class: "number" }, integer(one.calls)), el("td", {}, outcomeBar(one.outcomes)),
    el("td", { class: "number" }, percent((one.outcomes.ok ?? 0) / one.calls)),
    el("td", { class: "number" }, atMost(quantile(one.bins, .5))), el("td", { class: "number" }, atMost(quantile(one.bins, .95)))));
}
