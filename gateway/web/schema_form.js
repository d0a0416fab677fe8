// A form made from a JSON Schema; what the form cannot express is entered as JSON. The gateway validates the arguments.
import { el, put } from "./dom.js";
import { choices, matches, resolveSchema, typeLabel, hasType, allowsExtra, isEqual, schemaType } from "./schema.js";

const MAX_DEPTH = 8;
/** The value of a field that is left out. */
export const ABSENT = Symbol("absent");
let last = 0;

/** Invalid input, with the field's node. */
export class InputError extends Error {
  constructor(message, node) { super(message); this.node = node; }
}

const NUMBERS = /"(?:[^"\\]|\\.)*"|-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?/g;
/** Whether a number survives parsing: an integer may have more digits than JavaScript keeps. */
const isExact = written => /^-?\d+$/.test(written) ? Number.isSafeInteger(Number(written)) : Number.isFinite(Number(written));

/** Parses JSON; throws an InputError if it is invalid or a number would lose digits. */
export function parseJson(written, label, node) {
  const lost = written.match(NUMBERS)?.find(one => !one.startsWith('"') && !isExact(one));
  if (lost) throw new InputError(unsafeNumber(lost), node);
  try { return JSON.parse(written); } catch (error) { throw new InputError(`${label || "This"} is not JSON: ${error.message}`, node); }
}
const unsafeNumber = written => `The form would change ${written}: leave it out here and enter it under JSON, which is sent unchanged.`;

/** A control for a schema: `node` to show, `read()` for its value (or ABSENT). `start` is the initial value. */
export function control(schema, { root = schema, start, depth = 0, label = "" } = {}) {
  const one = resolveSchema(schema, root), more = { root, start, depth, label };
  const many = choices(one);
  // A value of another type is shown as JSON; the gateway reports the error.
  if (depth > MAX_DEPTH || (start !== undefined && !hasType(one, root, start))) return jsonControl(more);
  if (Array.isArray(one.enum)) return selectControl(one.enum, more);
  if ("const" in one) return selectControl([one.const], more);
  if (many?.every(part => "const" in resolveSchema(part, root))) return selectControl(many.map(part => resolveSchema(part, root).const), more);
  if (many?.length > 1) return unionControl(many, more);
  if (many?.length) return control(many[0], { ...more, depth: depth + 1 });
  switch (schemaType(one)) {
    case "string": return textControl(one, more);
    case "integer": case "number": return numberControl(one, more);
    case "boolean": return selectControl([true, false], more);
    case "null": return { node: el("span", { class: "dim small mono" }, "null"), read: () => null };
    case "array": return listControl(one, more);
    case "object": return objectControl(one, more);
    default: return jsonControl(more);
  }
}

function textControl(schema, { start, label }) {
  const node = el("textarea", { rows: 1, spellcheck: "false", "aria-label": label, placeholder: placeholder(schema, "") });
  if (start !== undefined) node.value = start;
  return { node, read: () => node.value === "" && start !== "" ? ABSENT : node.value, emptyValue: () => node.value };
}

function numberControl(schema, { start, label }) {
  const node = el("input", { type: "text", inputmode: "decimal", autocomplete: "off", "aria-label": label,
    placeholder: placeholder(schema, schema.type === "integer" ? "a whole number" : "a number") });
  if (start !== undefined) node.value = String(start);
  return { node, read: () => {
    const written = node.value.trim();
    if (written === "") return ABSENT;
    if (!/^-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?$/.test(written)) throw new InputError(`${label || "This"} is not a number.`, node);
    if (!isExact(written)) throw new InputError(unsafeNumber(written), node);
    return Number(written);
  } };
}

function selectControl(values, { start, label }) {
  const place = values.findIndex(value => isEqual(value, start));
  const words = value => typeof value === "string" ? value : JSON.stringify(value);
  const node = el("select", { "aria-label": label }, el("option", { value: "" }, "–"),
    values.map((value, at) => el("option", { value: String(at) }, words(value))));
  node.value = place < 0 ? "" : String(place);
  return { node, read: () => node.value === "" ? ABSENT : values[Number(node.value)] };
}

function jsonControl({ start, label }) {
  const node = el("textarea", { rows: 2, spellcheck: "false", "aria-label": label, placeholder: "any JSON" });
  if (start !== undefined) node.value = JSON.stringify(start, null, 1);
  return { node, read: () => node.value.trim() === "" ? ABSENT : parseJson(node.value, label, node) };
}

function unionControl(many, { root, start, depth, label }) {
  const all = many.map(one => resolveSchema(one, root)), whole = all.findIndex(one => matches(one, root, start));
  const first = Math.max(0, start === undefined ? all.findIndex(one => one.type !== "null") : whole < 0 ? all.findIndex(one => hasType(one, root, start)) : whole);
  let chosen;
  const place = el("div", { class: "grow" });
  const which = el("select", { class: "which", "aria-label": `${label} is`, on: { change: () => choose(Number(which.value)) } },
    all.map((one, at) => el("option", { value: String(at) }, one.title ?? typeLabel(one, root))));
  const choose = (at, begin = all[at].const) => { chosen = control(many[at], { root, start: begin, depth: depth + 1, label }); put(place, chosen.node); };
  which.value = String(first);
  choose(first, start);
  return { node: el("div", { class: "alternative" }, which, place), read: () => chosen.read() };
}

function listControl(schema, { root, start, depth, label }) {
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
  // An added item counts even if empty: an empty text field is an empty string.
  const read = () => items.map(item => item.read() === ABSENT ? item.emptyValue?.() ?? null : item.read());
  return { node: el("div", { class: "stack" }, rows, el("div", {}, more)), read: () => items.length || start ? read() : ABSENT, emptyValue: () => [] };
}

function objectControl(schema, { root, start, depth, label }) {
  const given = start ?? {}, required = new Set(Array.isArray(schema.required) ? schema.required : []), named = Object.entries(schema.properties ?? {});
  const known = named.map(([name, one]) => propertyField(name, one, { root, start: Object.hasOwn(given, name) ? given[name] : undefined, depth: depth + 1, required: required.has(name) }));
  const others = Object.fromEntries(Object.entries(given).filter(([name]) => !Object.hasOwn(schema.properties ?? {}, name)));
  const free = Object.keys(others).length || allowsExtra(schema) ? extraProperties(schema, others, known, label) : null;
  const read = () => {
    const beside = free ? free.read() : ABSENT;
    const value = known.map(one => [one.name, one.read()]).filter(([, found]) => found !== ABSENT);
    // A name such as __proto__ is like any other.
    return Object.fromEntries([...value, ...Object.entries(beside === ABSENT ? {} : beside)]);
  };
  return { node: el("div", { class: depth ? "fields inner" : "fields" }, known.map(one => one.node), free?.node),
    read: () => { const value = read(); return depth && start === undefined && !Object.keys(value).length ? ABSENT : value; }, emptyValue: () => ({}) };
}

/** Further properties of an object, as JSON; behind a button if the schema merely doesn't forbid them. */
function extraProperties(schema, others, known, label) {
  const some = Object.keys(others).length > 0, title = known.length ? "further properties, as JSON" : "properties, as JSON";
  const words = el("span", { class: "label" }, title), name = `${label || "Further"} properties`;
  const make = () => {
    const { node, read } = jsonControl({ label: name, start: some ? others : undefined });
    const own = value => {
      if (typeof value !== "object" || value === null || Array.isArray(value)) throw new InputError(`${name} are not a JSON object.`, node);
      const twice = known.find(one => Object.hasOwn(value, one.name));
      if (twice) throw new InputError(`${twice.name} has a field of its own.`, node);
      return value;
    };
    return { node, read: () => { const value = read(); return value === ABSENT ? ABSENT : own(value); } };
  };
  if (schema.properties && !schema.additionalProperties && !schema.patternProperties && !some) return optionalField(name, words, null, make);
  const inner = make();
  return { node: el("div", { class: "field" }, words, inner.node), read: inner.read };
}

function propertyField(name, schema, { root, start, depth, required }) {
  const one = resolveSchema(schema, root), id = `field-${last += 1}`;
  const title = el("span", { class: "row" }, el("code", { class: "field-name", id }, name),
    el("span", { class: "dim tiny" }, typeLabel(one, root)), required ? el("span", { class: "tag" }, "required") : null);
  const description = one.description ? el("p", { class: "dim tiny" }, one.description) : null;
  if (isObjectSchema(one, root) && !required && start === undefined) return optionalField(name, title, description, () => control(schema, { root, depth, label: name }));
  const inner = control(schema, { root, start: start === undefined && required ? one.const : start, depth, label: name });
  return { name, node: el("div", { class: "field", data: { field: name } }, title, description, inner.node), read: () => {
    const value = inner.read();
    // A required field left empty is sent as an empty value if it has one, such as "".
    return value === ABSENT && required && inner.emptyValue ? inner.emptyValue() : value;
  } };
}

/** An optional object, created on demand, so that a recursive schema ends. */
function optionalField(name, title, description, make) {
  let inner = null;
  const place = el("div", {});
  const act = () => {
    inner = inner ? null : make();
    put(place, inner?.node);
    button.textContent = inner ? "Leave out" : "+ Add";
  };
  const button = el("button", { type: "button", class: "quiet", "aria-label": `Add or leave out ${name}`, on: { click: act } }, "+ Add");
  return { name, node: el("div", { class: "field", data: { field: name } }, el("div", { class: "row between" }, title, button), description, place),
    read: () => inner ? (inner.read() === ABSENT ? inner.emptyValue?.() ?? {} : inner.read()) : ABSENT };
}

/** Whether the control shown first is for an object. */
function isObjectSchema(schema, root) {
  const first = choices(schema)?.map(one => resolveSchema(one, root)).find(one => one.type !== "null") ?? schema;
  return first.type === "object" || Boolean(first.properties);
}

function placeholder(schema, otherwise) {
  if ("default" in schema && schema.default !== null) return `left out: ${JSON.stringify(schema.default)}`;
  return schema.examples?.length ? `such as ${schema.examples[0]}` : otherwise;
}
