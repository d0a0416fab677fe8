// Rollouts in a table as long as the run: the rows that are seen are asked for, and no others.

import { $, count, el, number, percent, put, seconds, whole } from "./dom.js";
import { choices, file, table } from "./data.js";
import { link, note } from "./place.js";

const PAGE = 100, POLL_MS = 2000, SEARCH_MS = 30, AHEAD = 8;
const SORTS = { place: "#", step: "Step", task: "Task", reward: "Reward", stop: "Ended", turns: "Turns", tokens: "Tokens", tools: "Tools", blame: "Failure of" };
const SORTED = new Set(["place", "step", "task", "reward", "stop", "turns", "tokens", "blame"]);
const FILTERS = ["q", "step", "kind", "success", "stop", "tool", "outcome", "blame", "least", "most"];
/** What was last asked for, so that a rollout knows its neighbours. */
const last = { run: null, asked: {}, index: null };

/** The rollout before or after this one, as the table was last sorted and filtered; null at its end. */
export async function neighbour(run, place, way) {
  const index = last.run === run && last.place === place ? last.index + way : null;
  if (index === null) return place + way < 0 ? null : place + way;
  if (index < 0) return null;
  const found = (await table(run, { ...last.asked, offset: index, limit: 1 })).rows[0];
  if (!found) return null;
  Object.assign(last, { index, place: found.place });
  return found.place;
}
export const cameFrom = run => link(run, "rollouts", null, last.run === run ? last.asked : {});

export async function view({ frame, run, here }) {
  const asked = Object.fromEntries([...FILTERS, "sort", "group"].filter(name => here.asked[name]).map(name => [name, here.asked[name]]));
  const pages = new Map(), asking = new Set();
  let total = 0, picked = last.run === run.name && JSON.stringify(last.asked) === JSON.stringify(asked) ? last.index ?? 0 : 0, seen = null, told = null, over = false, stop = new AbortController(), height = 36, room = 0, queue = Promise.resolve();
  const made = new Map();

  const rows = el("div", { class: "rows", role: "rowgroup" });
  const list = el("div", { class: "list", role: "table", "aria-label": "Rollouts", tabindex: 0 }, head(), rows);
  const summary = el("p", { class: "summary dim small", role: "status" });
  const nothing = el("div", { class: "empty" });
  Object.assign(last, { run: run.name, asked });

  function head() {
    return el("div", { class: "line head", role: "row" }, Object.entries(SORTS).map(([name, title]) => {
      if (!SORTED.has(name)) return el("span", { class: `cell ${name}`, role: "columnheader" }, title);
      const up = asked.sort === name || (name === "place" && !asked.sort), down = asked.sort === `-${name}`;
      return el("span", { class: `cell ${name}`, role: "columnheader", "aria-sort": up ? "ascending" : down ? "descending" : "none" },
        el("button", { class: "sort", on: { click: () => change({ sort: up ? `-${name}` : down ? (name === "place" ? "" : name) : ["reward", "step"].includes(name) ? `-${name}` : name }) } }, title, el("span", { class: "way", "aria-hidden": true }, up ? "↑" : down ? "↓" : "")));
    }));
  }
  async function change(more) {
    Object.assign(asked, more);
    for (const name of Object.keys(asked)) if (!asked[name]) delete asked[name];
    note({ ...Object.fromEntries([...FILTERS, "sort", "group"].map(name => [name, ""])), ...asked });
    stop.abort();
    stop = new AbortController();
    pages.clear();
    asking.clear();
    picked = 0;
    list.scrollTop = 0;
    list.replaceChild(head(), list.firstChild);
    await fetchPage(0);
    later();
  }
  /** One question after the other: a search goes on from where the last one came to. Null where it was given up. */
  function ask(more, wanted = () => true) {
    const { signal } = stop, act = () => signal.aborted || !wanted() ? null : table(run.name, { ...asked, ...more }, signal);
    const answer = queue.then(act).then(found => signal.aborted ? null : found, error => { if (signal.aborted) return null; throw error; });
    queue = answer.catch(() => null);
    return answer;
  }
  const wrong = error => { put(summary, el("span", { class: "wrong" }, error.message)); };
  async function fetchPage(page) {
    if (asking.has(page)) return;
    const mine = stop;
    asking.add(page);
    try {
      const found = await ask({ offset: page * PAGE, limit: PAGE }, () => !page || inSight(page));
      if (!found) return;
      pages.set(page, found.rows);
      seen = found;
      total = found.total;
    } catch (error) {
      wrong(error);
      pages.set(page, []);
      total = 0;
      seen = null;
    } finally {
      if (mine === stop) asking.delete(page);
    }
    draw();
  }
  const firstSeen = () => Math.max(0, Math.floor(list.scrollTop / height) - AHEAD), endSeen = () => Math.min(total, Math.ceil((list.scrollTop + room) / height) + AHEAD);
  const inSight = page => page * PAGE < endSeen() && (page + 1) * PAGE > firstSeen();
  /** Asked for when the list changes its size, not while it is scrolled: both make the browser lay everything out. */
  function measure() {
    height = parseFloat(getComputedStyle(list).getPropertyValue("--row")) || 36;
    room = list.clientHeight;
  }
  /** Rows that stay keep their nodes, and these their place: a frame costs what came into sight. */
  function draw() {
    const first = firstSeen(), end = endSeen();
    for (const [at, { node }] of made) if (at < first || at >= end) { node.remove(); made.delete(at); }
    for (let at = end - 1; at >= first; at -= 1) {
      const page = pages.get(Math.floor(at / PAGE)), row = page?.[at % PAGE], known = made.get(at);
      if (!page) fetchPage(Math.floor(at / PAGE));
      if (known && known.row === row && known.height === height) { mark(known, at); continue; }
      const one = { row, height, node: line(row, at, height), picked: null };
      if (known) known.node.replaceWith(one.node);
      else rows.insertBefore(one.node, made.get(at + 1)?.node ?? null);
      made.set(at, one);
      mark(one, at);
    }
    if (seen && seen !== told) tell();
  }
  function mark(one, at) {
    if (one.picked === (at === picked)) return;
    one.picked = at === picked;
    one.node.setAttribute("aria-selected", String(one.picked));
  }
  function tell() {
    told = seen;
    rows.style.setProperty("height", `${total * height}px`);
    list.setAttribute("aria-rowcount", total);
    put(nothing, el("p", {}, seen.known ? "No rollout is like that." : "No rollout is over yet."));
    total ? nothing.remove() : rows.append(nothing);
    put(summary, said());
  }
  function said() {
    const parts = [el("b", {}, count(total, "rollout"))];
    if (seen.reward !== null && total) parts.push(` · mean reward ${number(seen.reward, 3)}`);
    if (seen.success !== null && total) parts.push(` · ${percent(seen.success)} succeed`);
    if (asked.q && seen.looked < seen.known) parts.push(` · looked into ${whole(seen.looked)} of ${whole(seen.known)}`);
    if (seen.listed < 1) parts.push(` · ${Math.floor(seen.listed * 100)} % of the run listed so far`);
    return parts;
  }
  function line(row, at, height) {
    const style = { transform: `translateY(${at * height}px)` };
    if (!row) return el("div", { class: "line ghost", style, role: "row" });
    const cell = (name, ...inside) => el("span", { class: `cell ${name}`, role: "cell" }, inside);
    const share = row.reward === null ? null : Math.max(0, Math.min(1, row.reward));
    return el("a", { class: "line", style, role: "row", "aria-rowindex": at + 1, tabindex: -1, href: link(run.name, "rollout", row.place),
        data: { infra: row.success === null && row.reward === null ? "yes" : null }, on: { click: () => keep(at, row) } },
      cell("place number dim", row.place), cell("step number", row.step ?? "–"),
      cell("task", el("span", { class: "asked" }, row.question || row.task), " ", el("span", { class: "dim" }, row.answer ? `→ ${row.answer}` : "")),
      cell("reward number", el("span", { class: "meter", "aria-hidden": true }, share === null ? null : el("i", { data: { success: row.success === 1 ? "yes" : row.success === 0 ? "no" : "none" }, style: { width: `${share * 100}%` } })), el("span", { class: "figure" }, number(row.reward, 3))),
      cell("stop", row.stop.replaceAll("_", " ")), cell("turns number", row.turns), cell("tokens number", whole(row.tokens)),
      cell("tools", Object.entries(row.tools).map(([name, many]) => el("span", { class: "tag" }, many > 1 ? `${name} ×${many}` : name))),
      cell("blame", row.blame ? el("span", { class: "chip", data: { author: ["policy", "tool"].includes(row.blame) ? row.blame : null, blame: row.blame } }, row.blame) : ""));
  }
  function keep(at, row) { Object.assign(last, { run: run.name, asked: { ...asked }, index: at, place: row.place }); }
  function pick(at) {
    picked = Math.max(0, Math.min(total - 1, at));
    const top = picked * height, free = room - 34;
    if (top < list.scrollTop) list.scrollTop = top;
    if (top + height > list.scrollTop + free) list.scrollTop = top + height - free;
    draw();
  }
  const open = () => {
    const row = pages.get(Math.floor(picked / PAGE))?.[picked % PAGE];
    if (!row) return false;
    keep(picked, row);
    location.hash = link(run.name, "rollout", row.place);
  };

  const filters = el("div", { class: "choices" }), choose = async () => { const found = await bars(run, asked, change); if (!over) put(filters, found); };
  const chosen = choose();
  put(frame, el("h1", { class: "unseen" }, "Rollouts"), filters, summary, el("div", { class: "panel flush holder" }, list));
  let waiting = false;
  list.addEventListener("scroll", () => { if (!waiting) { waiting = true; requestAnimationFrame(() => { waiting = false; draw(); }); } }, { passive: true });
  await fetchPage(0);
  chosen.catch(() => {});
  requestAnimationFrame(() => { measure(); pick(picked); });
  const resized = new ResizeObserver(() => { measure(); told = null; draw(); });
  resized.observe(list);
  let timer = 0;
  function later() {
    const searching = asked.q && seen && seen.looked < seen.known;
    clearTimeout(timer);
    if (!over && !file) timer = setTimeout(again, searching ? SEARCH_MS : POLL_MS);
  }
  async function again() {
    if (!document.hidden) await look();
    later();
  }
  async function look() {
    const found = await ask({ limit: 0 }).catch(wrong);
    if (!found) return;
    const grown = found.total !== total;
    if (seen?.listed < 1 && found.listed === 1 && !filters.contains(document.activeElement)) choose().catch(() => {});
    seen = { ...found };
    total = found.total;
    if (grown && (asked.q || (asked.sort && asked.sort !== "place"))) pages.clear();
    else if (grown) for (const [page, rows] of pages) if (rows.length < PAGE) pages.delete(page);
    draw();
  }
  later();
  return { title: `Rollouts of ${run.name}`, leave: () => { over = true; stop.abort(); clearTimeout(timer); resized.disconnect(); last.index ??= picked; },
    acts: { j: () => pick(picked + 1), k: () => pick(picked - 1), ArrowDown: () => pick(picked + 1), ArrowUp: () => pick(picked - 1), Enter: open,
      "/": () => $("input[type=search]", frame).focus(), Escape: () => { document.activeElement?.blur(); list.focus(); } } };
}

async function bars(run, asked, change) {
  const known = await choices(run.name);
  let timer = 0;
  const later = act => event => { clearTimeout(timer); const { value } = event.target; timer = setTimeout(() => act(value), 180); };
  const select = (name, title, options) => el("label", { class: "filter" }, el("span", { class: "label" }, title),
    el("select", { name, value: asked[name] ?? "", on: { change: event => change({ [name]: event.target.value }) } },
      el("option", { value: "" }, "any"), options.map(([value, text]) => el("option", { value, selected: asked[name] === value }, text))));
  const listed = (counted, said = name => name) => Object.entries(counted).map(([name, many]) => [name, `${said(name)} (${whole(many)})`]);
  const field = (name, title, hint) => el("label", { class: "filter short" }, el("span", { class: "label" }, title),
    el("input", { name, value: asked[name] ?? "", placeholder: hint, inputmode: "decimal", autocomplete: "off", on: { input: later(value => change({ [name]: value.trim() })) } }));
  const unfold = el("button", { class: "unfold", type: "button", "aria-expanded": "false", on: { click: event => {
    event.target.setAttribute("aria-expanded", String(form.classList.toggle("open"))); } } }, "Filters");
  const form = el("form", { class: "filters", role: "search", on: { submit: event => event.preventDefault() } },
    el("label", { class: "filter search" }, el("span", { class: "label" }, "Search"),
      el("input", { type: "search", name: "q", value: asked.q ?? "", placeholder: "in questions, answers, calls, results", autocomplete: "off", on: { input: later(value => change({ q: value })) } })), unfold,
    field("step", "Step", known.first === null || known.first === undefined ? "" : `${known.first}-${known.last}`),
    field("least", "Reward ≥", ""), field("most", "Reward ≤", ""),
    Object.keys(known.kind).length ? select("kind", "Kind of task", listed(known.kind)) : null,
    select("success", "Succeeded", [["yes", "yes"], ["no", "no"], ["none", "not scored"]]),
    select("stop", "Ended", listed(known.stop, name => name.replaceAll("_", " "))), select("tool", "Tool used", listed(known.tool)),
    select("outcome", "Outcome", listed(known.outcome)), select("blame", "Failure of", listed(known.blame)));
  if (FILTERS.some(name => name !== "q" && asked[name])) form.classList.add("open");
  return form;
}
