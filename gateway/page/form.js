// A form made from a JSON Schema. It lets a person say what the schema allows, and what it does not know it takes as
// JSON; the gateway judges the arguments, as it judges a policy's.
import { el, put } from "./dom.js";
import { choices, fits, joined, kind, like, open, same, typed } from "./schema.js";

const DEEPEST = 8;
/** Of a field that is left out. */
export const ABSENT = Symbol("absent");
let last = 0;

/** What a person has written that is no value at all. */
export class Mistake extends Error {
  constructor(message, node) { super(message); this.node = node; }
}

const NUMBERS = /"(?:[^"\\]|\\.)*"|-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?/g;
/** Whether a number is still the one that was written: an integer may have more digits than the browser keeps. */
const kept = written => /^-?\d+$/.test(written) ? Number.isSafeInteger(Number(written)) : Number.isFinite(Number(written));

/** The value of JSON; a Mistake where it is none, or where it would not stay what was written. */
export function parsed(written, label, node) {
  const lost = written.match(NUMBERS)?.find(one => !one.startsWith('"') && !kept(one));
  if (lost) throw new Mistake(unkept(lost), node);
  try { return JSON.parse(written); } catch (error) { throw new Mistake(`${label || "This"} is not JSON: ${error.message}`, node); }
}
const unkept = written => `A form would change ${written}: leave it out here, and write it under JSON, which is sent as it is written.`;

/** A control for a schema: `node` to show, `read()` for its value (or ABSENT). `start` is a value to begin with. */
export function control(schema, { root = schema, start, depth = 0, label = "" } = {}) {
  const one = joined(schema, root), more = { root, start, depth, label };
  const many = choices(one);
  // What is not of its kind is shown as it is: it is the gateway that says so.
  if (depth > DEEPEST || (start !== undefined && !like(one, root, start))) return json(more);
  if (Array.isArray(one.enum)) return picked(one.enum, more);
  if ("const" in one) return picked([one.const], more);
  if (many?.every(part => "const" in joined(part, root))) return picked(many.map(part => joined(part, root).const), more);
  if (many?.length > 1) return alternative(many, more);
  if (many?.length) return control(many[0], { ...more, depth: depth + 1 });
  switch (typed(one)) {
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
  if (start !== undefined) node.value = start;
  return { node, read: () => node.value === "" && start !== "" ? ABSENT : node.value, whole: () => node.value };
}

function numeric(schema, { start, label }) {
  const node = el("input", { type: "text", inputmode: "decimal", autocomplete: "off", "aria-label": label,
    placeholder: hint(schema, schema.type === "integer" ? "a whole number" : "a number") });
  if (start !== undefined) node.value = String(start);
  return { node, read: () => {
    const written = node.value.trim();
    if (written === "") return ABSENT;
    if (!/^-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?$/.test(written)) throw new Mistake(`${label || "This"} is not a number.`, node);
    if (!kept(written)) throw new Mistake(unkept(written), node);
    return Number(written);
  } };
}

function picked(values, { start, label }) {
  const place = values.findIndex(value => same(value, start));
  const words = value => typeof value === "string" ? value : JSON.stringify(value);
  const node = el("select", { "aria-label": label }, el("option", { value: "" }, "–"),
    values.map((value, at) => el("option", { value: String(at) }, words(value))));
  node.value = place < 0 ? "" : String(place);
  return { node, read: () => node.value === "" ? ABSENT : values[Number(node.value)] };
}

function json({ start, label }) {
  const node = el("textarea", { rows: 2, spellcheck: "false", "aria-label": label, placeholder: "any JSON" });
  if (start !== undefined) node.value = JSON.stringify(start, null, 1);
  return { node, read: () => node.value.trim() === "" ? ABSENT : parsed(node.value, label, node) };
}

function alternative(many, { root, start, depth, label }) {
  const all = many.map(one => joined(one, root)), whole = all.findIndex(one => fits(one, root, start));
  const first = Math.max(0, start === undefined ? all.findIndex(one => one.type !== "null") : whole < 0 ? all.findIndex(one => like(one, root, start)) : whole);
  let chosen;
  const place = el("div", { class: "grow" });
  const which = el("select", { class: "which", "aria-label": `${label} is`, on: { change: () => choose(Number(which.value)) } },
    all.map((one, at) => el("option", { value: String(at) }, one.title ?? kind(one, root))));
  const choose = (at, begin = all[at].const) => { chosen = control(many[at], { root, start: begin, depth: depth + 1, label }); put(place, chosen.node); };
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
  for (const begin of start ?? []) add(begin);
  for (let at = 0; !start && at < Math.min(8, schema.minItems ?? 0); at += 1) add();
  // An item that was added is meant: of a text that is empty, the empty text.
  const read = () => items.map(item => item.read() === ABSENT ? item.whole?.() ?? null : item.read());
  return { node: el("div", { class: "stack" }, rows, el("div", {}, more)), read: () => items.length || start ? read() : ABSENT, whole: () => [] };
}

function object(schema, { root, start, depth, label }) {
  const given = start ?? {}, required = new Set(Array.isArray(schema.required) ? schema.required : []), named = Object.entries(schema.properties ?? {});
  const known = named.map(([name, one]) => property(name, one, { root, start: Object.hasOwn(given, name) ? given[name] : undefined, depth: depth + 1, required: required.has(name) }));
  const others = Object.fromEntries(Object.entries(given).filter(([name]) => !Object.hasOwn(schema.properties ?? {}, name)));
  const free = Object.keys(others).length || open(schema) ? further(schema, others, known, label) : null;
  const read = () => {
    const beside = free ? free.read() : ABSENT;
    const value = known.map(one => [one.name, one.read()]).filter(([, found]) => found !== ABSENT);
    // A name such as __proto__ is a name like any other.
    return Object.fromEntries([...value, ...Object.entries(beside === ABSENT ? {} : beside)]);
  };
  return { node: el("div", { class: depth ? "fields inner" : "fields" }, known.map(one => one.node), free?.node),
    read: () => { const value = read(); return depth && start === undefined && !Object.keys(value).length ? ABSENT : value; }, whole: () => ({}) };
}

/** What an object may have beside what its schema names: behind a button, where the schema only does not forbid it. */
function further(schema, others, known, label) {
  const some = Object.keys(others).length > 0, title = known.length ? "further properties, as JSON" : "properties, as JSON";
  const words = el("span", { class: "label" }, title), name = `${label || "Further"} properties`;
  const make = () => {
    const { node, read } = json({ label: name, start: some ? others : undefined });
    const own = value => {
      if (typeof value !== "object" || value === null || Array.isArray(value)) throw new Mistake(`${name} are not a JSON object.`, node);
      const twice = known.find(one => Object.hasOwn(value, one.name));
      if (twice) throw new Mistake(`${twice.name} has a field of its own.`, node);
      return value;
    };
    return { node, read: () => { const value = read(); return value === ABSENT ? ABSENT : own(value); } };
  };
  if (schema.properties && !schema.additionalProperties && !schema.patternProperties && !some) return folded(name, words, null, make);
  const inner = make();
  return { node: el("div", { class: "field" }, words, inner.node), read: inner.read };
}

function property(name, schema, { root, start, depth, required }) {
  const one = joined(schema, root), id = `field-${last += 1}`;
  const title = el("span", { class: "row" }, el("code", { class: "field-name", id }, name),
    el("span", { class: "dim tiny" }, kind(one, root)), required ? el("span", { class: "tag" }, "required") : null);
  const told = one.description ? el("p", { class: "dim tiny" }, one.description) : null;
  if (deep(one, root) && !required && start === undefined) return folded(name, title, told, () => control(schema, { root, depth, label: name }));
  const inner = control(schema, { root, start: start === undefined && required ? one.const : start, depth, label: name });
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
