// The sessions view: all open sessions. Closing one needs two clicks, because a rollout may still use it.
import { fetchJson, count, el, number, put, seconds } from "./dom.js";

export function sessions(state, _, refresh) {
  const place = el("div", { class: "panel flush" }), summary = el("p", { class: "dim small number", role: "status" });
  const node = el("div", { class: "stack" }, el("div", { class: "row between" }, el("h2", {}, "Open sessions"), summary), place);
  const body = el("tbody", {}), rows = new Map();
  const table = el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Open sessions" }, el("table", {},
    el("thead", {}, el("tr", {}, [["Session"], ["Task"], ["Tools", "spare"], ["Interaction", "spare"], ["Calls", "number"], ["Reward", "number spare"],
      ["Open for", "number"], ["Ends in", "number spare"], [""]].map(([words, kind]) => el("th", { scope: "col", class: kind }, words || el("span", { class: "unseen" }, "Close"))))), body));
  const update = async () => {
    const { data } = await fetchJson("v1/live/sessions");
    put(summary, count(data.length, "session"));
    const here = new Set(data.map(one => one.id));
    for (const [id, made] of rows) if (!here.has(id)) { made.node.remove(); rows.delete(id); }
    for (const one of data) {
      if (!rows.has(one.id)) { const made = row(one, update); rows.set(one.id, made); body.append(made.node); }
      rows.get(one.id).update(one);
    }
    const wanted = data.length ? table : el("div", { class: "empty" }, el("p", {}, "No session is open. Each rollout opens one for its tools."));
    if (place.firstChild !== wanted) put(place, wanted);
  };
  update().catch(error => put(place, el("div", { class: "empty" }, el("p", {}, error.message))));
  return { node, update };
}

function row(one, update) {
  const calls = el("td", { class: "number" }), reward = el("td", { class: "number spare" }), age = el("td", { class: "number" }), ends = el("td", { class: "number spare" });
  const shut = el("button", { type: "button", class: "quiet", on: { click: act, blur: () => { shut.textContent = "Close"; shut.classList.add("quiet"); } } }, "Close");
  async function act() {
    if (shut.textContent === "Close") { shut.textContent = "Really close"; shut.classList.remove("quiet"); return; }
    shut.disabled = true;
    await fetchJson(`v1/live/sessions/${one.id}`, { method: "DELETE" }).catch(() => null);
    await update();
  }
  const node = el("tr", {}, el("td", {}, el("a", { class: "mono plain", href: `#/calls/${one.id}`, title: "Its calls" }, one.id.slice(0, 8))),
    el("td", { class: "cut" }, one.task_id || el("span", { class: "dim" }, "–")),
    el("td", { class: "cut spare", title: one.tools.join("\n") }, one.tools.length > 3 ? count(one.tools.length, "tool") : el("code", {}, one.tools.join(", "))),
    el("td", { class: "spare" }, one.feedback ?? el("span", { class: "dim" }, "–")), calls, reward, age, ends, el("td", { class: "number" }, shut));
  return { node, update: now => {
    put(calls, now.calls, now.running.length ? el("span", { class: "dim" }, ` + ${now.running.length} running`) : null);
    put(reward, now.rewards.length ? number(now.rewards.reduce((sum, { value }) => sum + (value ?? 0), 0)) : "–");
    put(age, seconds(Math.round(now.age_s)));
    put(ends, now.expires_in_s === null ? "–" : seconds(Math.round(now.expires_in_s)));
  } };
}
