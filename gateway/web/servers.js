// The servers view: a list, and a page for each server with its state, failures, restart and the tail of its log.
import { fetchJson, clock, count, el, put, seconds } from "./dom.js";
import { fold } from "./result.js";

const AGAIN_MS = 1500;
export const STATE_LABELS = { up: "up", starting: "starting", restarting: "restarting", unresponsive: "does not answer", down: "down",
  stale: "down; its last known tools are still offered" };
const RANK = { down: 0, stale: 1, unresponsive: 2, restarting: 3, starting: 4, up: 5 };
/** The server that a tool comes from; null for native tools. */
export const serverOf = tool => tool.owner.match(/^mcp server (['"])(.*)\1$/)?.[2] ?? null;
export const serverLink = name => `#/servers/${encodeURIComponent(name)}`;
/** The servers, those with problems first. */
export const ranked = health => Object.entries(health?.servers ?? {}).sort(([, a], [, b]) => (RANK[a.state] ?? 0) - (RANK[b.state] ?? 0));

export function servers(state, [wanted]) {
  const list = el("ul", { class: "list" }), detail = el("div", { class: "stack wide detail" });
  const node = el("div", { class: "sides", data: { chosen: wanted ? "yes" : "no" } },
    el("aside", { class: "stack" }, el("h2", {}, "Servers"), el("nav", { "aria-label": "Servers" }, list)), detail);
  let page = null, drawn = "";

  const draw = () => {
    const all = ranked(state.health), now = JSON.stringify([wanted, Boolean(state.health), all.map(([name, one]) => [name, one.state, one.tools])]);
    if (now === drawn) return;
    drawn = now;
    const held = list.contains(document.activeElement) ? document.activeElement.hash : null;
    put(list, all.map(([name, one]) => el("li", {}, el("a", { href: serverLink(name), class: "item", "aria-current": name === wanted ? "true" : null, data: { state: one.state } },
      el("span", { class: "row centre tightrow" }, el("span", { class: "dot" }), el("span", { class: "field-name" }, name)),
      el("span", { class: "dim tiny line" }, `${STATE_LABELS[one.state] ?? one.state} · ${count(one.tools, "tool")}`)))),
      all.length || !state.health ? null : el("li", { class: "dim small" }, "There are none. They are named in mcp_servers.json."));
    if (held) [...list.querySelectorAll("a")].find(link => link.hash === held)?.focus();
  };
  const show = () => {
    page?.leave();
    page = wanted ? serverPage(wanted, state) : null;
    put(detail, page ? page.node : el("div", { class: "empty" }, el("p", {}, "Select a server to see its state and what it wrote to standard error.")));
  };
  const step = by => {
    const links = [...list.querySelectorAll("a")], at = links.findIndex(link => link.hash === location.hash);
    const next = links[Math.min(links.length - 1, Math.max(0, at + by))];
    if (next) location.hash = next.hash;
  };
  draw();
  show();
  return { node, update: draw, leave: () => page?.leave(), keys: { j: () => step(1), k: () => step(-1) },
    go: rest => { [wanted] = rest; node.dataset.chosen = wanted ? "yes" : "no"; draw(); show(); } };
}

function serverPage(name, state) {
  const path = `v1/servers/${encodeURIComponent(name)}`;
  const chip = el("span", { class: "chip", role: "status" }), problem = el("div", { class: "stack" }), facts = el("dl", { class: "facts" });
  const answer = el("div", { "aria-live": "polite" }), tools = el("div", {}), extra = el("div", { class: "stack" });
  const log = el("pre", { class: "log wrap", tabindex: "0", role: "region", "aria-label": `Standard error of ${name}` });
  const logPanel = el("section", { class: "stack" });
  const restart = el("button", { type: "button", on: { click: act, blur: calm } }, "Restart");
  const head = el("header", { class: "stack" }, el("a", { class: "back small", href: "#/servers" }, "← All servers"),
    el("div", { class: "row between centre" }, el("div", { class: "row centre" }, el("h2", {}, name), chip), restart), answer);
  const node = el("div", { class: "stack wide" }, head);
  const stop = new AbortController();
  let armed = false, timer = null, last = null;
  const drawn = new Map();
  // Redraws a part only when its data has changed, so that what is open or selected stays so.
  const changed = (part, data) => { const now = JSON.stringify(data), is = drawn.get(part) !== now; drawn.set(part, now); return is; };

  function label(one) { return one && one.transport !== "stdio" ? "Reconnect" : "Restart"; }
  function calm() {
    if (armed) put(answer);
    armed = false;
    restart.textContent = label(last);
    restart.classList.remove("first");
  }
  // Two clicks, because rollouts lose the state that they keep in the server.
  async function act() {
    if (!armed) {
      armed = true;
      restart.textContent = `Really ${label(last).toLowerCase()}`;
      restart.classList.add("first");
      put(answer, el("p", { class: "small dim" }, "Calls that are running end as unavailable, and state that the server keeps is lost."));
      return;
    }
    restart.disabled = true;
    try {
      armed = false;
      draw(await fetchJson(`${path}/restart`, { method: "POST" }));
      put(answer, el("p", { class: "small dim" }, "The restart has begun."));
    } catch (error) { fail(error); } finally { restart.disabled = false; calm(); }
  }
  function fail(error) {
    put(answer, el("div", { class: "notice small", data: { outcome: "error" }, role: "alert" }, el("p", {}, error.message),
      error.remedy ? el("p", { class: "remedy" }, error.remedy) : null));
  }
  function draw(one) {
    last = one;
    chip.dataset.state = one.state;
    const words = STATE_LABELS[one.state] ?? one.state;
    if (chip.textContent !== words) chip.textContent = words;
    if (!armed) restart.textContent = label(one);
    if (answer.textContent === "The restart has begun." && one.state === "up") put(answer, el("p", { class: "small dim" }, "It is up again."));
    if (changed("problem", [one.state, one.reason, one.remedy, one.last_loss])) put(problem, problemOf(one));
    put(facts, factsOf(one).map(([term, value]) => el("div", {}, el("dt", { class: "label" }, term), el("dd", {}, value))));
    const mine = state.tools.filter(tool => serverOf(tool) === name);
    if (changed("tools", mine.map(tool => tool.name))) put(tools, mine.length ? fold(`Its ${count(mine.length, "tool")}`, el("ul", { class: "row small" }, mine.map(tool => el("li", {},
      el("a", { class: "mono plain", href: `#/tools/${encodeURIComponent(tool.name)}` }, tool.name))))) : null);
    if (changed("extra", one.quarantined)) put(extra, Object.entries(one.quarantined).map(([tool, reason]) => el("p", { class: "small dim" }, el("code", {}, tool), ` is left out: ${reason}`)));
    drawLog(one);
    if (!node.contains(facts)) node.append(el("section", { class: "stack" }, problem, facts, tools, extra), logPanel);
  }
  function drawLog(one) {
    // Follow the end, unless the reader has scrolled up.
    const follows = log.scrollTop + log.clientHeight >= log.scrollHeight - 8;
    const text = one.log || (one.transport === "stdio" ? "It has written nothing." : "");
    if (!text) { put(logPanel, el("h3", {}, "Log"), el("p", { class: "small dim" }, "The gateway did not start this server, so its log is where it runs.")); return; }
    if (log.textContent !== text) log.textContent = text;
    if (!logPanel.contains(log)) put(logPanel, el("div", { class: "row between" }, el("h3", {}, "Standard error"), el("p", { class: "dim small" }, "its last lines, also of processes before a restart")), log);
    if (follows) log.scrollTop = log.scrollHeight;
  }
  async function look() {
    try {
      if (!document.hidden) draw(await fetchJson(path, { signal: stop.signal }));
    } catch (error) {
      if (stop.signal.aborted) return;
      if (error.status === 404) put(node, el("div", { class: "empty" }, el("p", {}, `There is no server ${name}. `), el("a", { href: "#/servers" }, "All servers")));
    }
    if (!stop.signal.aborted) timer = setTimeout(look, AGAIN_MS);
  }
  look();
  return { node, leave: () => { stop.abort(); clearTimeout(timer); } };
}

function problemOf(one) {
  if (one.state !== "up" && (one.reason || one.remedy))
    return el("div", { class: "notice small", data: { state: one.state } }, el("p", { class: "given" }, one.reason), one.remedy ? el("p", { class: "remedy" }, one.remedy) : null);
  return one.last_loss ? el("div", { class: "notice small" }, el("p", { class: "label" }, "It has recovered. It was down because:"), el("p", { class: "given" }, one.last_loss)) : null;
}

function factsOf(one) {
  const cuts = Object.entries(one.cuts).map(([reason, many]) => `${reason} ${many}`).join(", ");
  const age = Math.round(Date.now() / 1000 - one.state_since);
  return [["In this state since", [clock(one.state_since), el("span", { class: "small dim" }, age >= 1 ? ` ${seconds(age)} ago` : " just now")]], ["Transport", one.transport || "–"],
    ["MCP version", one.protocol || "–"], ["Tools", String(one.tools)], ["Restarts", String(one.reconnects)],
    one.processes.length ? [one.processes.length === 1 ? "Process" : "Processes", one.processes.length > 6 ? count(one.processes.length, "process", "processes") : one.processes.join(", ")] : null,
    one.cut ? ["Cut for a flood", cuts] : null].filter(Boolean);
}
