// The table of rollouts: virtual scrolling that loads only visible rows, with filters, sorting and search.

import { $, count, el, keepFocus, number, percent, put, integer } from "./dom.js";
import { fetchChoices, fetchRows, linkTo, updateAddress } from "./data.js";

const PAGE = 100, POLL_MS = 2000, SEARCH_MS = 30, AHEAD = 8;
const SORTS = { place: "#", step: "Step", task: "Task", reward: "Reward", stop: "Ended", turns: "Turns", tokens: "Tokens", tools: "Tools", blame: "Failure of" };
const SORTED = new Set(["place", "step", "task", "reward", "stop", "turns", "tokens", "blame"]);
const FILTERS = ["q", "step", "kind", "source", "success", "stop", "tool", "outcome", "blame", "least", "most"];
/** The last table, from which a rollout's neighbours are found. */
const lastTable = { run: null, params: {}, index: null };

/** The next or previous rollout in the order and filter of the last table; null at its end. */
export async function neighbour(run, number, direction) {
  const index = lastTable.run === run && lastTable.place === number ? lastTable.index + direction : null;
  if (index === null) return number + direction < 0 ? null : number + direction;
  if (index < 0) return null;
  const row = (await fetchRows(run, { ...lastTable.params, offset: index, limit: 1 })).rows[0];
  if (!row) return null;
  Object.assign(lastTable, { index, place: row.place });
  return row.place;
}
export const cameFrom = run => linkTo(run, "rollouts", null, lastTable.run === run ? lastTable.params : {});

export async function view({ frame, run, address }) {
  const params = Object.fromEntries([...FILTERS, "sort", "group"].filter(name => address.params[name]).map(name => [name, address.params[name]]));
  const pages = new Map(), pending = new Set();
  let total = 0, selected = lastTable.run === run.name && JSON.stringify(lastTable.params) === JSON.stringify(params) ? lastTable.index ?? 0 : 0, response = null, summarized = null, over = false, stop = new AbortController(), height = 36, viewHeight = 0, queue = Promise.resolve();
  const drawnRows = new Map();

  const rows = el("div", { class: "rows", role: "rowgroup" });
  const list = el("div", { class: "list", role: "grid", "aria-label": "Rollouts; j and k or the arrow keys choose, Enter opens", tabindex: 0 }, head(), rows);
  const summary = el("p", { class: "summary dim small", role: "status" });
  const nothing = el("div", { class: "empty", hidden: true });
  Object.assign(lastTable, { run: run.name, params });

  function head() {
    return el("div", { class: "line head", role: "row" }, Object.entries(SORTS).map(([name, title]) => {
      if (!SORTED.has(name)) return el("span", { class: `cell ${name}`, role: "columnheader" }, title);
      const up = params.sort === name || (name === "place" && !params.sort), down = params.sort === `-${name}`;
      return el("span", { class: `cell ${name}`, role: "columnheader", "aria-sort": up ? "ascending" : down ? "descending" : "none" },
        el("button", { class: "sort", id: `sort-${name}`, on: { click: () => change({ sort: up ? `-${name}` : down ? (name === "place" ? "" : name) : ["reward", "step"].includes(name) ? `-${name}` : name }) } }, title, el("span", { class: "way", "aria-hidden": true }, up ? "↑" : down ? "↓" : "")));
    }));
  }
  async function change(changes) {
    Object.assign(params, changes);
    for (const name of Object.keys(params)) if (!params[name]) delete params[name];
    updateAddress({ ...Object.fromEntries([...FILTERS, "sort", "group"].map(name => [name, ""])), ...params });
    stop.abort();
    stop = new AbortController();
    pages.clear();
    pending.clear();
    selected = 0;
    list.scrollTop = 0;
    keepFocus(list, () => list.replaceChild(head(), list.firstChild));
    await fetchPage(0);
    schedule();
  }
  /** Requests one after the other, since each continues the search of the last; null if aborted. */
  function requestRows(changes, wanted = () => true) {
    const { signal } = stop, act = () => signal.aborted || !wanted() ? null : fetchRows(run.name, { ...params, ...changes }, signal);
    const answer = queue.then(act).then(result => signal.aborted ? null : result, error => { if (signal.aborted) return null; throw error; });
    queue = answer.catch(() => null);
    return answer;
  }
  const showError = error => { put(summary, el("span", { class: "wrong" }, error.message)); };
  async function fetchPage(page) {
    if (pending.has(page)) return;
    const request = stop;
    pending.add(page);
    try {
      const result = await requestRows({ offset: page * PAGE, limit: PAGE }, () => !page || isVisible(page));
      if (!result) return;
      pages.set(page, result.rows);
      response = result;
      total = result.total;
    } catch (error) {
      showError(error);
      pages.set(page, []);
      total = 0;
      response = null;
    } finally {
      if (request === stop) pending.delete(page);
    }
    draw();
  }
  const firstSeen = () => Math.max(0, Math.floor(list.scrollTop / height) - AHEAD), endSeen = () => Math.min(total, Math.ceil((list.scrollTop + viewHeight) / height) + AHEAD);
  const isVisible = page => page * PAGE < endSeen() && (page + 1) * PAGE > firstSeen();
  /** Measures the list when its size changes, not while scrolling, since it forces a layout. */
  function measure() {
    height = parseFloat(getComputedStyle(list).getPropertyValue("--row")) || 36;
    viewHeight = list.clientHeight;
  }
  /** Draws visible rows; nodes of rows that stay visible are kept. */
  function draw() {
    const first = firstSeen(), end = endSeen();
    for (const [index, { node }] of drawnRows) if (index < first || index >= end) { node.remove(); drawnRows.delete(index); }
    for (let index = end - 1; index >= first; index -= 1) {
      const page = pages.get(Math.floor(index / PAGE)), row = page?.[index % PAGE], existing = drawnRows.get(index);
      if (!page) fetchPage(Math.floor(index / PAGE));
      if (existing && existing.row === row && existing.height === height) { mark(existing, index); continue; }
      const drawn = { row, height, node: line(row, index, height), picked: null };
      if (existing) existing.node.replaceWith(drawn.node);
      else rows.insertBefore(drawn.node, drawnRows.get(index + 1)?.node ?? null);
      drawnRows.set(index, drawn);
      mark(drawn, index);
    }
    if (response && response !== summarized) updateSummary();
  }
  function mark(drawn, index) {
    if (drawn.picked === (index === selected)) return;
    drawn.picked = index === selected;
    drawn.node.setAttribute("aria-selected", String(drawn.picked));
    if (drawn.picked) list.setAttribute("aria-activedescendant", drawn.node.id);
  }
  function updateSummary() {
    summarized = response;
    rows.style.setProperty("height", `${total * height}px`);
    list.setAttribute("aria-rowcount", total);
    put(nothing, el("p", {}, response.known ? "No rollout matches." : "No rollout has ended yet."));
    nothing.hidden = total > 0;
    put(summary, summaryParts());
  }
  function summaryParts() {
    const parts = [el("b", {}, count(total, "rollout"))];
    if (response.reward !== null && total) parts.push(` · mean reward ${number(response.reward, 3)}`);
    if (response.success !== null && total) parts.push(` · ${percent(response.success)} succeed`);
    if (params.q && response.looked < response.known) parts.push(` · searched ${integer(response.looked)} of ${integer(response.known)}`);
    if (/^[1-9]\d*$/.test(params.step ?? "")) parts.push(" · ", el("a", { href: linkTo(run.name, "compare", `${params.step - 1}-${params.step}`) }, `what changed since step ${params.step - 1}`));
    if (response.listed < 1) parts.push(` · ${Math.floor(response.listed * 100)} % of the run indexed so far`);
    return parts;
  }
  function line(row, index, height) {
    const style = { transform: `translateY(${index * height}px)` };
    if (!row) return el("div", { class: "line ghost", style, role: "row", id: `row-${index}` });
    const cell = (name, ...inside) => el("span", { class: `cell ${name}`, role: "gridcell" }, inside);
    const share = row.reward === null ? null : Math.max(0, Math.min(1, row.reward));
    const link = el("a", { class: "question", tabindex: -1, href: linkTo(run.name, "rollout", row.place), on: { click: () => remember(index, row) } }, row.question || row.task);
    return el("div", { class: "line filled", style, role: "row", id: `row-${index}`, "aria-rowindex": index + 1, data: { infra: row.success === null && row.reward === null ? "yes" : null } },
      cell("place number dim", row.place), cell("step number", row.step ?? "–"),
      cell("task", link, " ", el("span", { class: "dim" }, row.answer ? `→ ${row.answer}` : "")),
      cell("reward number", el("span", { class: "meter", "aria-hidden": true }, share === null ? null : el("i", { data: { success: row.success === 1 ? "yes" : row.success === 0 ? "no" : "none" }, style: { width: `${share * 100}%` } })), el("span", { class: "figure" }, number(row.reward, 3))),
      cell("stop", row.stop.replaceAll("_", " ")), cell("turns number", row.turns), cell("tokens number", integer(row.tokens)),
      cell("tools", Object.entries(row.tools).map(([name, times]) => el("span", { class: "tag" }, times > 1 ? `${name} ×${times}` : name))),
      cell("blame", row.blame ? el("span", { class: "chip", data: { author: ["policy", "tool"].includes(row.blame) ? row.blame : null, blame: row.blame } }, row.blame) : ""));
  }
  function remember(index, row) { Object.assign(lastTable, { run: run.name, params: { ...params }, index, place: row.place }); }
  function select(index) {
    selected = Math.max(0, Math.min(total - 1, index));
    const top = selected * height, free = viewHeight - 34;
    if (top < list.scrollTop) list.scrollTop = top;
    if (top + height > list.scrollTop + free) list.scrollTop = top + height - free;
    draw();
  }
  const open = () => {
    const row = pages.get(Math.floor(selected / PAGE))?.[selected % PAGE];
    if (!row) return false;
    remember(selected, row);
    location.hash = linkTo(run.name, "rollout", row.place);
  };

  const filters = el("div", { class: "choices" }), choose = async () => { const result = await filterForm(run, params, change); if (!over) put(filters, result); };
  const chosen = choose();
  put(frame, el("h1", { class: "unseen" }, "Rollouts"), filters, summary, el("div", { class: "panel flush holder" }, list, nothing));
  let waiting = false;
  list.addEventListener("scroll", () => { if (!waiting) { waiting = true; requestAnimationFrame(() => { waiting = false; draw(); }); } }, { passive: true });
  await fetchPage(0);
  chosen.catch(() => {});
  requestAnimationFrame(() => { measure(); select(selected); });
  const resized = new ResizeObserver(() => { measure(); summarized = null; draw(); });
  resized.observe(list);
  let timer = 0;
  function schedule() {
    const searching = params.q && response && response.looked < response.known;
    clearTimeout(timer);
    if (!over) timer = setTimeout(poll, searching ? SEARCH_MS : POLL_MS);
  }
  async function poll() {
    if (!document.hidden) await checkForNews();
    schedule();
  }
  async function checkForNews() {
    const result = await requestRows({ limit: 0 }).catch(showError);
    if (!result) return;
    const grown = result.total !== total;
    if (response?.listed < 1 && result.listed === 1 && !filters.contains(document.activeElement)) choose().catch(() => {});
    response = { ...result };
    total = result.total;
    if (grown && (params.q || (params.sort && params.sort !== "place"))) pages.clear();
    else if (grown) for (const [page, rows] of pages) if (rows.length < PAGE) pages.delete(page);
    draw();
  }
  schedule();
  return { title: `Rollouts of ${run.name}`, leave: () => { over = true; stop.abort(); clearTimeout(timer); resized.disconnect(); lastTable.index ??= selected; },
    actions: { j: () => select(selected + 1), k: () => select(selected - 1), ArrowDown: () => select(selected + 1), ArrowUp: () => select(selected - 1), Enter: open, w: () => { const step = params.step && /^\d+$/.test(params.step) ? Number(params.step) : pages.get(Math.floor(selected / PAGE))?.[selected % PAGE]?.step; return step ? (location.hash = linkTo(run.name, "compare", `${step - 1}-${step}`)) : false; },
      "/": () => $("input[type=search]", frame).focus(), Escape: () => { document.activeElement?.blur(); list.focus(); } } };
}

async function filterForm(run, params, change) {
  const choices = await fetchChoices(run.name);
  let timer = 0;
  const debounce = action => event => { clearTimeout(timer); const { value } = event.target; timer = setTimeout(() => action(value), 180); };
  const select = (name, title, options) => el("label", { class: "filter" }, el("span", { class: "label" }, title),
    el("select", { name, value: params[name] ?? "", on: { change: event => change({ [name]: event.target.value }) } },
      el("option", { value: "" }, "any"), options.map(([value, text]) => el("option", { value, selected: params[name] === value }, text))));
  const countedOptions = (counted, label = name => name) => Object.entries(counted).map(([name, times]) => [name, `${label(name)} (${integer(times)})`]);
  const field = (name, title, hint) => el("label", { class: "filter short" }, el("span", { class: "label" }, title),
    el("input", { name, value: params[name] ?? "", placeholder: hint, inputmode: "decimal", autocomplete: "off", on: { input: debounce(value => change({ [name]: value.trim() })) } }));
  const unfold = el("button", { class: "unfold", type: "button", "aria-expanded": "false", on: { click: event => {
    event.target.setAttribute("aria-expanded", String(form.classList.toggle("open"))); } } }, "Filters");
  const form = el("form", { class: "filters", role: "search", on: { submit: event => event.preventDefault() } },
    el("label", { class: "filter search" }, el("span", { class: "label" }, "Search"),
      el("input", { type: "search", name: "q", value: params.q ?? "", placeholder: "in questions, answers, calls, results", autocomplete: "off", on: { input: debounce(value => change({ q: value })) } })), unfold,
    field("step", "Step", choices.first === null || choices.first === undefined ? "" : `${choices.first}-${choices.last}`),
    field("least", "Reward ≥", ""), field("most", "Reward ≤", ""),
    Object.keys(choices.kind).length ? select("kind", "Kind of task", countedOptions(choices.kind)) : null,
    Object.keys(choices.source).length > 1 ? select("source", "Data source", countedOptions(choices.source)) : null,
    select("success", "Succeeded", [["yes", "yes"], ["no", "no"], ["none", "not scored"]]),
    select("stop", "Ended", countedOptions(choices.stop, name => name.replaceAll("_", " "))), select("tool", "Tool used", countedOptions(choices.tool)),
    select("outcome", "Outcome", countedOptions(choices.outcome)), select("blame", "Failure of", countedOptions(choices.blame)));
  if (FILTERS.some(name => name !== "q" && params[name])) form.classList.add("open");
  return form;
}
