// The gateway's web UI: selects the view, and polls the state that all views share.
import { $, Refusal, fetchJson, count, el, keys, put, fetchResponse } from "./dom.js";
import { calls } from "./calls.js";
import { overview } from "./overview.js";
import { perTool } from "./metrics.js";
import { servers } from "./servers.js";
import { tools } from "./tools.js";

const AGAIN_MS = 2000;
const VIEWS = { "": ["Overview", overview], servers: ["Servers", servers], tools: ["Tools", tools], calls: ["Calls", calls] };
const state = { health: null, tools: [], stats: new Map() };
let open = { name: null, view: null };

function route() {
  const [name = "", ...rest] = location.hash.replace(/^#\/?/, "").split("/").map(part => { try { return decodeURIComponent(part); } catch { return part; } });
  const known = name in VIEWS ? name : "";
  put($("#tabs"), Object.entries(VIEWS).map(([key, [words]]) => el("a", { class: "tab", href: `#/${key}`, "aria-current": key === known ? "page" : null }, words, many(key))));
  document.title = `${VIEWS[known][0]} · mtrl gateway`;
  if (open.name === known && open.view?.go) return open.view.go(rest);
  open.view?.leave?.();
  open = { name: known, view: VIEWS[known][1](state, rest) };
  put($("#main"), open.view.node);
  scrollTo(0, 0);
}

function many(key) {
  const value = key === "tools" ? state.tools.length : key === "servers" ? Object.keys(state.health?.servers ?? {}).length : 0;
  return value ? el("span", { class: "dim tiny number" }, String(value)) : null;
}

function tell(words, outcome) {
  const chip = $("#health");
  if (chip.textContent !== words) chip.textContent = words;
  chip.dataset.state = outcome;
}

async function look() {
  const before = state.health;
  // Fetched first, because it needs the token, which the other requests may do without.
  if (!before || before.tools !== state.tools.length) state.tools = (await fetchJson("v1/tools?audience=all&form=spec")).data;
  const [health, numbers] = await Promise.all([fetchJson("healthz"), fetchResponse("metrics").then(reply => reply.text())]);
  if (before && JSON.stringify(before.servers) !== JSON.stringify(health.servers)) state.tools = (await fetchJson("v1/tools?audience=all&form=spec")).data;
  state.health = health;
  state.stats = perTool(numbers);
  const starting = (health.starting ?? []).length, notUp = Object.values(health.servers ?? {}).filter(server => server.state !== "up").length;
  const down = notUp - starting;
  const words = [down > 0 && `${count(down, "server")} down`, starting && `${count(starting, "server")} starting`, health.reload_refusal && "changed files refused"].filter(Boolean);
  tell(words.join(", ") || "all servers up", down > 0 || health.reload_refusal ? "down" : starting ? "starting" : "up");
  for (const tab of document.querySelectorAll("#tabs a")) {
    const key = tab.hash.slice(2), now = many(key);
    if (tab.querySelector("span")?.textContent !== now?.textContent) put(tab, VIEWS[key][0], now);
  }
  await open.view?.update?.();
}

async function keepUp() {
  for (;;) {
    if (!document.hidden) {
      try { await look(); } catch (error) {
        if (!(error instanceof Refusal)) throw error;
        tell(error.status ? error.message : "does not answer", "down");
      }
    }
    await new Promise(resolve => setTimeout(resolve, AGAIN_MS));
  }
}

const act = key => event => open.view?.keys?.[key]?.(event);
keys({ ...Object.fromEntries(Object.keys(VIEWS).map((name, at) => [String(at + 1), () => { location.hash = `#/${name}`; }])),
  j: act("j"), k: act("k"), p: act("p"), "/": act("/"), Escape: () => document.activeElement?.blur() });
addEventListener("hashchange", route);
// Load the state before drawing the first view, so that the layout does not jump.
look().catch(() => null).finally(() => { route(); keepUp(); });
