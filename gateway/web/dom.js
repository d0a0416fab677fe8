// DOM, HTTP and formatting helpers. Text from others becomes text nodes and attributes, never markup. Imports and
// exports take one line each, so that a page's modules can be joined into one script.

const SVG = "http://www.w3.org/2000/svg";
const TOKEN = "mtrl-token";

function fill(node, given, children) {
  for (const [name, value] of Object.entries(given ?? {})) {
    if (value === undefined || value === null || value === false) continue;
    if (name === "on") for (const [event, act] of Object.entries(value)) node.addEventListener(event, act);
    else if (name === "data") for (const [key, one] of Object.entries(value)) { if (one !== null && one !== undefined) node.dataset[key] = one; }
    // Set through the object model, because the page's policy forbids style attributes.
    else if (name === "style") for (const [key, one] of Object.entries(value)) node.style.setProperty(key, one);
    else if (name === "value") node.value = value;
    else if (/^on/i.test(name) || name === "srcdoc") throw new Error(`${name} could run code`);
    else if (/^(href|src)$/.test(name) && !/^(https?:|blob:|data:(image|audio|video)\/|[#/.?]|[\w-]+([/.?#]|$))/i.test(value))
      throw new Error(`${name} has a URL that is not allowed`);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...flat(children));
  return node;
}
function flat(children) {
  return children.flat(Infinity).filter(one => one !== null && one !== undefined && one !== false)
    .map(one => one instanceof Node ? one : String(one));
}

/** An element: el("p", {class: "dim", on: {click: act}, data: {outcome: "ok"}, style: {"--x": 1}}, "text", node, [more]). */
export function el(tag, given, ...children) { return fill(document.createElement(tag), given, children); }
export function svg(tag, given, ...children) { return fill(document.createElementNS(SVG, tag), given, children); }
/** Replaces the children of a node. */
export function put(parent, ...children) { parent.replaceChildren(...flat(children)); return parent; }
export const $ = (selector, within = document) => within.querySelector(selector);
export const $$ = (selector, within = document) => [...within.querySelectorAll(selector)];

const FOCUSABLE = "a[href], button, input, select, textarea, summary, [tabindex]";
const focusKey = node => node.id || [node.tagName, ...["href", "name", "aria-label"].map(name => node.getAttribute(name)), node.textContent].join("|");
/** Updates a part of the page. If the focused control is replaced, the focus moves to its successor. */
export function keepFocus(within, update) {
  const active = document.activeElement, key = within.contains(active) ? focusKey(active) : null;
  const alike = () => $$(FOCUSABLE, within).filter(node => focusKey(node) === key), place = key === null ? -1 : alike().indexOf(active);
  update();
  if (key === null || active.isConnected) return;
  const successors = alike();
  (successors[place] ?? successors[0])?.focus({ preventScroll: true });
}

/** An error response of the server: `message`, and `remedy` if there is one. */
export class Refusal extends Error {
  constructor(status, error) {
    super(error?.message ?? (status ? `The server answered ${status}.` : "The page's server does not answer."));
    this.status = status;
    this.remedy = error?.remedy ?? (status ? "" : "If it was stopped, start it again; this page retries.");
    this.param = error?.param ?? "";
  }
}

export const token = () => sessionStorage.getItem(TOKEN) ?? "";
export function storeToken(value) { value ? sessionStorage.setItem(TOKEN, value) : sessionStorage.removeItem(TOKEN); }

/** Fetches a response; if a token is needed, prompts for it, once for all waiting requests. */
export async function fetchResponse(path, { method = "GET", body, signal, keepalive } = {}) {
  for (;;) {
    const sent = token();
    const headers = sent ? { authorization: `Bearer ${sent}` } : {};
    if (body !== undefined) headers["content-type"] = "application/json";
    let reply;
    try {
      reply = await fetch(path, { method, headers, signal, keepalive, cache: "no-store", referrerPolicy: "no-referrer",
        body: body === undefined ? undefined : JSON.stringify(body) });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new Refusal(0);
    }
    if (reply.ok) return reply;
    const answer = await reply.json().catch(() => null);
    if (reply.status !== 401) throw new Refusal(reply.status, answer?.error);
    if (sent === token()) await promptForToken(sent !== "");
  }
}
/** Fetches JSON. */
export async function fetchJson(path, options) { return (await fetchResponse(path, options)).json(); }

/** Calls `each` for every line of an endless response of JSON lines, until it ends or is aborted. */
export async function streamLines(path, each, options) {
  const reader = (await fetchResponse(path, options)).body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const whole = (rest + value).split("\n");
    rest = whole.pop();
    for (const line of whole) if (line.trim()) each(JSON.parse(line));
  }
}

let wanted = null;
function promptForToken(wrong) {
  wanted ??= new Promise(resolve => {
    const field = el("input", { type: "password", id: "token", autocomplete: "off", required: true, "aria-invalid": wrong });
    const act = event => { event.preventDefault(); storeToken(field.value.trim()); box.close(); };
    const box = el("dialog", { "aria-labelledby": "token-title", on: { cancel: event => event.preventDefault(),
        close: () => { box.remove(); wanted = null; resolve(); } } },
      el("form", { class: "stack", on: { submit: act } },
        el("h2", { id: "token-title" }, "This server needs a token"),
        el("p", { class: "dim small" }, wrong ? "That token is wrong. " : "",
          "It is in the file that the server was started with (", el("code", {}, "--token-file"),
          "). It is stored until this tab closes."),
        el("label", { class: "label", for: "token" }, "Token"), field,
        el("div", { class: "row" }, el("button", { class: "first", type: "submit" }, "Continue"))));
    document.body.append(box);
    box.showModal();
  });
  return wanted;
}

// Formatting of numbers.
const grouped = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
export const integer = value => value === null || value === undefined ? "–" : grouped.format(value);
export function number(value, digits = 3) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (Number.isInteger(value) && Math.abs(value) < 1e6) return grouped.format(value);
  const size = Math.abs(value);
  return size !== 0 && (size < 1e-3 || size >= 1e6) ? value.toExponential(digits - 1) : String(Number(value.toPrecision(digits)));
}
export function seconds(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  if (value < 1e-3) return `${Math.round(value * 1e6)} µs`;
  if (value < 1) return `${number(value * 1e3, value < .1 ? 2 : 3)} ms`;
  if (value < 100) return `${number(value, 3)} s`;
  if (value < 6000) return `${Math.floor(value / 60)} min ${Math.round(value % 60)} s`;
  return `${Math.floor(value / 3600)} h ${Math.round(value % 3600 / 60)} min`;
}
export function bytes(value) {
  const units = ["B", "KB", "MB", "GB", "TB"];
  let place = 0;
  while (value >= 1000 && place < units.length - 1) { value /= 1000; place += 1; }
  return `${number(value, 3)} ${units[place]}`;
}
/** A change with its sign. */
export const signed = value => value === null || value === undefined || Number.isNaN(value) ? "–" : `${value < 0 ? "−" : value > 0 ? "+" : "±"}${number(Math.abs(value), 2)}`;
export const percent = value => value === null || value === undefined ? "–" : `${number(value * 100, 3)} %`;
export const count = (many, one, more = `${one}s`) => `${integer(many)} ${many === 1 ? one : more}`;
/** Formats Unix seconds as a time of day. */
export const clock = unix => new Date(unix * 1000).toLocaleTimeString("en-GB");

/** Binds keyboard shortcuts; they are inactive in input fields and with Ctrl, Alt or Meta. */
export function keys(acts) {
  document.addEventListener("keydown", event => {
    if (event.ctrlKey || event.altKey || event.metaKey || event.isComposing) return;
    if (event.target.closest?.("input, select, textarea, dialog") && event.key !== "Escape") return;
    const act = acts[event.key];
    if (act) { event.preventDefault(); act(event); }
  });
}
