// The page of the gateway: which view is open, and what all views know of the gateway, asked for again as time goes.
import { $, Refusal, ask, count, el, keys, put, reach } from "./dom.js";
import { calls } from "./calls.js";
import { overview } from "./overview.js";
import { perTool } from "./metrics.js";
import { sessions } from "./sessions.js";
import { tapes } from "./tapes.js";
import { tools } from "./tools.js";

const AGAIN_MS = 2000;
const VIEWS = { "": ["Overview", overview], tools: ["Tools", tools], calls: ["Calls", calls], sessions: ["Sessions", sessions], tapes: ["Tapes", tapes] };
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
  const value = key === "tools" ? state.tools.length : key === "sessions" ? state.health?.sessions : 0;
  return value ? el("span", { class: "dim tiny number" }, String(value)) : null;
}

function tell(words, outcome) {
  const chip = $("#health");
  if (chip.textContent !== words) chip.textContent = words;
  chip.dataset.state = outcome;
}

async function look() {
  const before = state.health;
  // The list is behind the token, so that it is asked for before anything that would answer without.
  if (!before || before.tools !== state.tools.length) state.tools = (await ask("v1/tools?audience=all&form=spec")).data;
  const [health, numbers] = await Promise.all([ask("healthz"), reach("metrics").then(reply => reply.text())]);
  if (before && JSON.stringify(before.servers) !== JSON.stringify(health.servers)) state.tools = (await ask("v1/tools?audience=all&form=spec")).data;
  state.health = health;
  state.stats = perTool(numbers);
  const down = Object.values(health.servers ?? {}).filter(server => server.state !== "up").length;
  tell(down ? `${count(down, "server")} down` : "all is well", down ? "down" : "up");
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
// What is known is known before the first view is drawn, so that nothing jumps.
look().catch(() => null).finally(() => { route(); keepUp(); });
