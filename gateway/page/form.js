// A form made from a JSON Schema. It lets a person say what the schema allows, and what it does not know it takes as
// JSON; the gateway judges the arguments, as it judges a policy's.
import { el, put } from "./dom.js";
import { choices, joined, kind } from "./schema.js";

const DEEPEST = 8;
/** Of a field that is left out. */
export const ABSENT = Symbol("absent");
let last = 0;

/** What a person has written that is no value at all. */
export class Mistake extends Error {
  constructor(message, node) { super(message); this.node = node; }
}

/** A control for a schema: `node` to show, `read()` for its value (or ABSENT). `start` is a value to begin with. */
export function control(schema, { root = schema, start, depth = 0, label = "" } = {}) {
  const one = joined(schema, root), more = { root, start, depth, label };
  const many = choices(one);
  if (depth > DEEPEST) return json(more);
  if (Array.isArray(one.enum)) return picked(one.enum, more);
  if ("const" in one) return picked([one.const], { ...more, start: one.const });
  if (many?.length > 1) return alternative(many, more);
  if (many?.length) return control(many[0], { ...more, depth: depth + 1 });
  switch (one.type ?? (one.properties || one.additionalProperties ? "object" : undefined)) {
    case "string": return text(one, more);
    case "integer": case "number": return numeric(one, more);
    case "boolean": return picked([true, false], more);
    case "null": return { node: el("span", { class: "dim small mono" }, "null"), read: () => null };
    case "array": return list(one, more);
    case "object": return object(one, more);
    default: return json(more);
  }
}

function text(schema, { start, label }) {
  const node = el("textarea", { rows: 1, spellcheck: "false", "aria-label": label, placeholder: hint(schema, "") });
  if (typeof start === "string") node.value = start;
  return { node, read: () => node.value === "" ? ABSENT : node.value, whole: () => node.value };
}

function numeric(schema, { start, label }) {
  const node = el("input", { type: "text", inputmode: "decimal", autocomplete: "off", "aria-label": label,
    placeholder: hint(schema, schema.type === "integer" ? "a whole number" : "a number") });
  if (typeof start === "number") node.value = String(start);
  return { node, read: () => {
    const written = node.value.trim();
    if (written === "") return ABSENT;
    if (!/^-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?$/.test(written)) throw new Mistake(`${label || "This"} is not a number.`, node);
    return Number(written);
  } };
}

function picked(values, { start, label }) {
  const place = values.findIndex(value => JSON.stringify(value) === JSON.stringify(start));
  const words = value => typeof value === "string" ? value : JSON.stringify(value);
  const node = el("select", { "aria-label": label }, el("option", { value: "" }, "–"),
    values.map((value, at) => el("option", { value: String(at) }, words(value))));
  node.value = place < 0 ? "" : String(place);
  return { node, read: () => node.value === "" ? ABSENT : values[Number(node.value)] };
}

function json({ start, label }) {
  const node = el("textarea", { rows: 2, spellcheck: "false", "aria-label": label, placeholder: "any JSON" });
  if (start !== undefined) node.value = JSON.stringify(start, null, 1);
  return { node, read: () => {
    if (node.value.trim() === "") return ABSENT;
    try { return JSON.parse(node.value); } catch (error) { throw new Mistake(`${label || "This"} is not JSON: ${error.message}`, node); }
  } };
}

function alternative(many, { root, start, depth, label }) {
  const fits = one => one.type === undefined || (one.type === "null" ? start === null : one.type === "array" ? Array.isArray(start)
    : one.type === "integer" || one.type === "number" ? typeof start === "number"
    : one.type === typeof start && start !== null && !Array.isArray(start));
  const all = many.map(one => joined(one, root));
  const first = start === undefined ? Math.max(0, all.findIndex(one => one.type !== "null")) : Math.max(0, all.findIndex(fits));
  let chosen;
  const place = el("div", { class: "grow" });
  const which = el("select", { class: "which", "aria-label": `${label} is`, on: { change: () => choose(Number(which.value)) } },
    all.map((one, at) => el("option", { value: String(at) }, one.title ?? kind(one, root))));
  const choose = (at, begin) => { chosen = control(many[at], { root, start: begin, depth: depth + 1, label }); put(place, chosen.node); };
  which.value = String(first);
  choose(first, start);
  return { node: el("div", { class: "alternative" }, which, place), read: () => chosen.read() };
}

function list(schema, { root, start, depth, label }) {
  const items = [], rows = el("ol", { class: "items" });
  const add = begin => {
    const at = items.length, form = schema.prefixItems?.[at] ?? schema.items ?? {};
    const item = control(form === true ? {} : form, { root, start: begin, depth: depth + 1, label: `${label} ${at + 1}` });
    const row = el("li", {}, el("div", { class: "grow" }, item.node),
      el("button", { type: "button", class: "quiet", "aria-label": `Remove ${label} ${at + 1}`,
        on: { click: () => { items.splice(items.indexOf(item), 1); row.remove(); } } }, "×"));
    items.push(item);
    rows.append(row);
    return row;
  };
  const more = el("button", { type: "button", class: "quiet", on: { click: () => add().querySelector("input, textarea, select, button")?.focus() } },
    "+ Add", el("span", { class: "unseen" }, ` to ${label}`));
  for (const begin of Array.isArray(start) ? start : []) add(begin);
  for (let at = items.length; at < Math.min(8, schema.minItems ?? 0); at += 1) add();
  // An item that was added is meant: of a text that is empty, the empty text.
  const read = () => items.map(item => item.read() === ABSENT ? item.whole?.() ?? null : item.read());
  return { node: el("div", { class: "stack" }, rows, el("div", {}, more)), read: () => items.length ? read() : ABSENT, whole: () => [] };
}

function object(schema, { root, start, depth, label }) {
  const given = start && typeof start === "object" ? start : {}, required = new Set(Array.isArray(schema.required) ? schema.required : []);
  const known = Object.entries(schema.properties ?? {}).map(([name, one]) =>
    property(name, one, { root, start: given[name], depth: depth + 1, required: required.has(name) }));
  const others = Object.fromEntries(Object.entries(given).filter(([name]) => !Object.hasOwn(schema.properties ?? {}, name)));
  const free = schema.additionalProperties ? json({ label: `${label || "Further"} properties`, start: Object.keys(others).length ? others : undefined }) : null;
  const node = el("div", { class: depth ? "fields inner" : "fields" }, known.map(one => one.node),
    free && el("div", { class: "field" }, el("span", { class: "label" }, known.length ? "further properties, as JSON" : "properties, as JSON"), free.node));
  const read = () => {
    const beside = free ? free.read() : ABSENT;
    const value = known.map(one => [one.name, one.read()]).filter(([, found]) => found !== ABSENT);
    // A name such as __proto__ is a name like any other.
    return Object.fromEntries([...value, ...Object.entries(beside === ABSENT ? {} : beside)]);
  };
  return { node, read: () => { const value = read(); return depth && !Object.keys(value).length ? ABSENT : value; }, whole: () => ({}) };
}

function property(name, schema, { root, start, depth, required }) {
  const one = joined(schema, root), id = `field-${last += 1}`;
  const title = el("span", { class: "row" }, el("code", { class: "field-name", id }, name),
    el("span", { class: "dim tiny" }, kind(one, root)), required ? el("span", { class: "tag" }, "required") : null);
  const told = one.description ? el("p", { class: "dim tiny" }, one.description) : null;
  if (deep(one, root) && !required && start === undefined) return folded(name, title, told, () => control(schema, { root, depth, label: name }));
  const inner = control(schema, { root, start, depth, label: name });
  return { name, node: el("div", { class: "field", data: { field: name } }, title, told, inner.node), read: () => {
    const value = inner.read();
    // What is required and left empty is sent empty where it can be: an empty text is a text.
    return value === ABSENT && required && inner.whole ? inner.whole() : value;
  } };
}

/** Objects that may be left out are made when they are wanted, so that a schema that holds itself has an end. */
function folded(name, title, told, make) {
  let inner = null;
  const place = el("div", {});
  const act = () => {
    inner = inner ? null : make();
    put(place, inner?.node);
    button.textContent = inner ? "Leave out" : "+ Add";
  };
  const button = el("button", { type: "button", class: "quiet", "aria-label": `Add or leave out ${name}`, on: { click: act } }, "+ Add");
  return { name, node: el("div", { class: "field", data: { field: name } }, el("div", { class: "row between" }, title, button), told, place),
    read: () => inner ? (inner.read() === ABSENT ? inner.whole?.() ?? {} : inner.read()) : ABSENT };
}

/** Whether what would be shown first is an object. */
function deep(schema, root) {
  const first = choices(schema)?.map(one => joined(one, root)).find(one => one.type !== "null") ?? schema;
  return first.type === "object" || Boolean(first.properties);
}

function hint(schema, otherwise) {
  if ("default" in schema && schema.default !== null) return `left out: ${JSON.stringify(schema.default)}`;
  return schema.examples?.length ? `such as ${schema.examples[0]}` : otherwise;
}
