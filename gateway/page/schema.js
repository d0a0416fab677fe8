// A JSON Schema as a person reads it, and the same with its references followed.
import { el } from "./dom.js";

const DEEPEST = 12;
const TOLD_APART = 4; // alternatives within alternatives: further in, one is as good as another
const LIMITS = [["minimum", "≥"], ["exclusiveMinimum", ">"], ["maximum", "≤"], ["exclusiveMaximum", "<"],
  ["minLength", "length ≥"], ["maxLength", "length ≤"], ["pattern", "like"], ["minItems", "items ≥"], ["maxItems", "items ≤"],
  ["multipleOf", "multiple of"], ["format", "format"]];

const isObject = value => typeof value === "object" && value !== null && !Array.isArray(value);

/** What a reference within the schema means; `{}` where it leads nowhere. */
export function followed(schema, root) {
  for (let step = 0; isObject(schema) && typeof schema.$ref === "string" && step < DEEPEST; step += 1) {
    let at = schema.$ref.startsWith("#") ? root : undefined;
    for (const part of schema.$ref.slice(1).split("/").slice(1))
      at = isObject(at) || Array.isArray(at) ? at[decodeURIComponent(part).replaceAll("~1", "/").replaceAll("~0", "~")] : undefined;
    const { $ref, ...beside } = schema;
    schema = at === undefined ? beside : { ...at, ...beside };
  }
  return isObject(schema) ? schema : {};
}

/** With the parts of `allOf` put together, as far as that is a matter of adding up. A schema may hold itself. */
export function joined(schema, root, depth = 0) {
  const whole = followed(schema, root);
  if (!Array.isArray(whole.allOf) || depth > DEEPEST) return whole;
  const { allOf, ...own } = whole;
  return allOf.map(one => joined(one, root, depth + 1)).reduce((sum, one) => ({
    ...one, ...sum,
    properties: one.properties || sum.properties ? { ...one.properties, ...sum.properties } : undefined,
    required: [one.required, sum.required].filter(Array.isArray).flat(),
  }), own);
}

/** The alternatives of a schema, where it has some. */
export function choices(schema) {
  const found = schema.anyOf ?? schema.oneOf;
  if (Array.isArray(found) && found.length) {
    const { anyOf, oneOf, ...beside } = schema;
    const { default: _, title, description, ...shared } = beside;
    return found.map(one => isObject(one) ? { ...shared, ...one } : {});
  }
  return Array.isArray(schema.type) ? schema.type.map(type => ({ ...schema, type })) : null;
}

/** Whether an object may have properties that its schema does not name. */
export const open = one => one.additionalProperties !== false || Boolean(one.patternProperties);
/** The type that is named, or meant by what else is. */
export const typed = one => one.type ?? (one.properties || one.additionalProperties ? "object" : undefined);
/** Whether two values are the same JSON. */
export const same = (one, other) => JSON.stringify(one) === JSON.stringify(other);

const KINDS = { string: value => typeof value === "string", number: value => typeof value === "number", integer: value => Number.isInteger(value),
  boolean: value => typeof value === "boolean", null: value => value === null, array: Array.isArray, object: isObject };

/** Whether a value is of the kind that a schema names, whatever may be inside it. */
export function like(schema, root, value, depth = 0) {
  const one = joined(schema, root), many = choices(one);
  if (Array.isArray(one.enum)) return one.enum.some(known => same(known, value));
  if ("const" in one) return same(one.const, value);
  if (many && depth < TOLD_APART) return many.some(part => like(part, root, value, depth + 1));
  return KINDS[typed(one)]?.(value) ?? true;
}
/** The same, with what an object must have and what it holds: what tells one alternative from another. */
export function fits(schema, root, value, depth = 0) {
  const one = joined(schema, root), many = choices(one);
  if (!like(one, root, value)) return false;
  if (depth > TOLD_APART) return true;
  if (many) return many.some(part => fits(part, root, value, depth + 1));
  if (Array.isArray(value)) return value.every(item => fits(one.items, root, item, depth + 1));
  if (!isObject(value)) return true;
  const known = one.properties ?? {}, has = name => Object.hasOwn(value, name);
  return (one.required ?? []).every(has) && (open(one) || Object.keys(value).every(name => Object.hasOwn(known, name)))
    && Object.keys(known).every(name => !has(name) || fits(known[name], root, value[name], depth + 1));
}

export function kind(schema, root, depth = 0) {
  const one = joined(schema, root), many = choices(one);
  if (depth > 3) return "…";
  if (many) return [...new Set(many.map(part => kind(part, root, depth + 1)))].join(" or ");
  if (one.enum) return "one of";
  if ("const" in one) return JSON.stringify(one.const);
  if (one.type === "array") return one.items ? `list of ${kind(one.items, root, depth + 1)}` : "list";
  if (typeof one.type === "string") return one.type;
  return one.properties ? "object" : "anything";
}

/** The parameters as a list: name, kind, what it may be, what it is for; what is inside an object stands below it. */
export function readable(schema, root, depth = 0) {
  const one = joined(schema, root), required = new Set(Array.isArray(one.required) ? one.required : []);
  const names = Object.keys(one.properties ?? {});
  if (!names.length) return depth ? null : el("p", { class: "dim small" }, open(one) ? "It names no arguments, and takes any." : "It takes no arguments.");
  return el("dl", { class: "schema" }, names.map(name => {
    const field = joined(one.properties[name], root);
    return el("div", {},
      el("dt", {}, el("code", { class: "field-name" }, name), " ", el("span", { class: "dim small" }, kind(field, root)),
        required.has(name) ? el("span", { class: "tag" }, "required") : null),
      el("dd", {}, field.description ? el("p", { class: "small" }, field.description) : null, limits(field), inside(field, root, depth)));
  }));
}

function limits(field) {
  const said = LIMITS.filter(([key]) => key in field).map(([key, words]) => `${words} ${field[key]}`);
  if (Array.isArray(field.enum)) said.push(field.enum.map(value => JSON.stringify(value)).join(" · "));
  if ("default" in field) said.push(`default ${JSON.stringify(field.default)}`);
  return said.length ? el("p", { class: "tiny dim mono" }, said.join(", ")) : null;
}

function inside(field, root, depth) {
  const inner = [field, field.items, ...(choices(field) ?? [])].filter(isObject)
    .map(one => joined(one, root)).find(one => one.properties);
  if (!inner) return null;
  if (depth >= 3) return el("p", { class: "tiny dim" }, "… and more inside; the schema as JSON has all of it.");
  return readable(inner, root, depth + 1);
}
