// Whatever others wrote becomes text nodes and attributes, never markup. Imports and exports stand one to a line,
// so that an export of a page can join its modules into one script.

const SVG = "http://www.w3.org/2000/svg";
const TOKEN = "mtrl-token";

function fill(node, given, children) {
  for (const [name, value] of Object.entries(given ?? {})) {
    if (value === undefined || value === null || value === false) continue;
    if (name === "on") for (const [event, act] of Object.entries(value)) node.addEventListener(event, act);
    else if (name === "data") for (const [key, one] of Object.entries(value)) { if (one !== null && one !== undefined) node.dataset[key] = one; }
    // Set by the object model, which the page's policy allows; a style attribute it would refuse.
    else if (name === "style") for (const [key, one] of Object.entries(value)) node.style.setProperty(key, one);
    else if (name === "value") node.value = value;
    else if (/^on/i.test(name) || name === "srcdoc") throw new Error(`${name} would run what it is given`);
    else if (/^(href|src)$/.test(name) && !/^(https?:|blob:|data:(image|audio|video)\/|[#/.?]|[\w-]+([/.?#]|$))/i.test(value))
      throw new Error(`${name} leads nowhere that a page may go`);
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
/** The children of a node become these. */
export function put(parent, ...children) { parent.replaceChildren(...flat(children)); return parent; }
export const $ = (selector, within = document) => within.querySelector(selector);
export const $$ = (selector, within = document) => [...within.querySelectorAll(selector)];

/** The value of a colour such as "policy" as it is now, light or dark: for canvas, which knows no variables. */
export function colour(name) {
  const probe = el("i", { style: { color: `var(--${name})` } });
  document.body.append(probe);
  const found = getComputedStyle(probe).color;
  probe.remove();
  return found;
}

/** What the server refused: `message`, and `remedy` where it knows one. */
export class Refusal extends Error {
  constructor(status, error) {
    super(error?.message ?? (status ? `The server answered ${status}.` : "The page's server does not answer."));
    this.status = status;
    this.remedy = error?.remedy ?? (status ? "" : "See whether it still runs; this page tries again.");
    this.param = error?.param ?? "";
  }
}

export const token = () => sessionStorage.getItem(TOKEN) ?? "";
export function keepToken(value) { value ? sessionStorage.setItem(TOKEN, value) : sessionStorage.removeItem(TOKEN); }

/** The whole response; where a token is missing it is asked for, once for all who wait. */
export async function reach(path, { method = "GET", body, signal } = {}) {
  for (;;) {
    const sent = token();
    const headers = sent ? { authorization: `Bearer ${sent}` } : {};
    if (body !== undefined) headers["content-type"] = "application/json";
    let reply;
    try {
      reply = await fetch(path, { method, headers, signal, cache: "no-store", referrerPolicy: "no-referrer",
        body: body === undefined ? undefined : JSON.stringify(body) });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new Refusal(0);
    }
    if (reply.ok) return reply;
    const told = await reply.json().catch(() => null);
    if (reply.status !== 401) throw new Refusal(reply.status, told?.error);
    if (sent === token()) await wantToken(sent !== "");
  }
}
/** The JSON of an answer. */
export async function ask(path, options) { return (await reach(path, options)).json(); }

/** Each line of an endless answer of JSON lines, until it ends or is aborted. */
export async function lines(path, each, options) {
  const reader = (await reach(path, options)).body.pipeThrough(new TextDecoderStream()).getReader();
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
function wantToken(wrong) {
  wanted ??= new Promise(resolve => {
    const field = el("input", { type: "password", id: "token", autocomplete: "off", required: true, "aria-invalid": wrong });
    const act = event => { event.preventDefault(); keepToken(field.value.trim()); box.close(); };
    const box = el("dialog", { "aria-labelledby": "token-title", on: { cancel: event => event.preventDefault(),
        close: () => { box.remove(); wanted = null; resolve(); } } },
      el("form", { class: "stack", on: { submit: act } },
        el("h2", { id: "token-title" }, "This server wants a token"),
        el("p", { class: "dim small" }, wrong ? "That token was not the right one. " : "",
          "It stands in the file that the server was started with (", el("code", {}, "--token-file"),
          "). It is kept until this tab closes."),
        el("label", { class: "label", for: "token" }, "Token"), field,
        el("div", { class: "row" }, el("button", { class: "first", type: "submit" }, "Go on"))));
    document.body.append(box);
    box.showModal();
  });
  return wanted;
}

// What numbers look like, in one place.
const grouped = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
export const whole = value => value === null || value === undefined ? "–" : grouped.format(value);
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
export const percent = value => value === null || value === undefined ? "–" : `${number(value * 100, 3)} %`;
export const count = (many, one, more = `${one}s`) => `${whole(many)} ${many === 1 ? one : more}`;
/** A time of day from Unix seconds. */
export const clock = unix => new Date(unix * 1000).toLocaleTimeString("en-GB");

/** Keys for the page, by the key's name; not while something is typed, nor with Ctrl, Alt or Meta. */
export function keys(acts) {
  document.addEventListener("keydown", event => {
    if (event.ctrlKey || event.altKey || event.metaKey || event.isComposing) return;
    if (event.target.closest?.("input, select, textarea, dialog") && event.key !== "Escape") return;
    const act = acts[event.key];
    if (act) { event.preventDefault(); act(event); }
  });
}
