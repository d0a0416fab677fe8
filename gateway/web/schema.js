// Reading a JSON Schema: resolving references and allOf, type checks, and a readable list of parameters.
import { el } from "./dom.js";

const MAX_DEPTH = 12;
const MAX_UNION_DEPTH = 4; // nesting of anyOf/oneOf that is checked to tell alternatives apart
const LIMITS = [["minimum", "≥"], ["exclusiveMinimum", ">"], ["maximum", "≤"], ["exclusiveMaximum", "<"],
  ["minLength", "length ≥"], ["maxLength", "length ≤"], ["pattern", "pattern"], ["minItems", "items ≥"], ["maxItems", "items ≤"],
  ["multipleOf", "multiple of"], ["format", "format"]];

const isObject = value => typeof value === "object" && value !== null && !Array.isArray(value);

/** Resolves a reference within the schema; `{}` if its target doesn't exist. */
export function followRef(schema, root) {
  for (let step = 0; isObject(schema) && typeof schema.$ref === "string" && step < MAX_DEPTH; step += 1) {
    let at = schema.$ref.startsWith("#") ? root : undefined;
    for (const part of schema.$ref.slice(1).split("/").slice(1))
      at = isObject(at) || Array.isArray(at) ? at[decodeURIComponent(part).replaceAll("~1", "/").replaceAll("~0", "~")] : undefined;
    const { $ref, ...beside } = schema;
    schema = at === undefined ? beside : { ...at, ...beside };
  }
  return isObject(schema) ? schema : {};
}

/** Resolves references and merges `allOf`. A schema may contain itself, so the depth is bounded. */
export function resolveSchema(schema, root, depth = 0) {
  const whole = followRef(schema, root);
  if (!Array.isArray(whole.allOf) || depth > MAX_DEPTH) return whole;
  const { allOf, ...own } = whole;
  return allOf.map(one => resolveSchema(one, root, depth + 1)).reduce((sum, one) => ({
    ...one, ...sum,
    properties: one.properties || sum.properties ? { ...one.properties, ...sum.properties } : undefined,
    required: [one.required, sum.required].filter(Array.isArray).flat(),
  }), own);
}

/** The alternatives of a schema (`anyOf`, `oneOf` or several types); null if there are none. */
export function choices(schema) {
  const found = schema.anyOf ?? schema.oneOf;
  if (Array.isArray(found) && found.length) {
    const { anyOf, oneOf, ...beside } = schema;
    const { default: _, title, description, ...shared } = beside;
    return found.map(one => isObject(one) ? { ...shared, ...one } : {});
  }
  return Array.isArray(schema.type) ? schema.type.map(type => ({ ...schema, type })) : null;
}

/** Whether an object may have properties that the schema does not name. */
export const allowsExtra = one => one.additionalProperties !== false || Boolean(one.patternProperties);
/** The declared type, or `object` if other keywords imply it. */
export const schemaType = one => one.type ?? (one.properties || one.additionalProperties ? "object" : undefined);
/** Whether two values have the same JSON. */
export const isEqual = (one, other) => JSON.stringify(one) === JSON.stringify(other);

const KINDS = { string: value => typeof value === "string", number: value => typeof value === "number", integer: value => Number.isInteger(value),
  boolean: value => typeof value === "boolean", null: value => value === null, array: Array.isArray, object: isObject };

/** Whether a value has a schema's type, without checking its contents. */
export function hasType(schema, root, value, depth = 0) {
  const one = resolveSchema(schema, root), many = choices(one);
  if (Array.isArray(one.enum)) return one.enum.some(known => isEqual(known, value));
  if ("const" in one) return isEqual(one.const, value);
  if (many && depth < MAX_UNION_DEPTH) return many.some(part => hasType(part, root, value, depth + 1));
  return KINDS[schemaType(one)]?.(value) ?? true;
}
/** Whether a value matches a schema, including properties and items; used to select an alternative. */
export function matches(schema, root, value, depth = 0) {
  const one = resolveSchema(schema, root), many = choices(one);
  if (!hasType(one, root, value)) return false;
  if (depth > MAX_UNION_DEPTH) return true;
  if (many) return many.some(part => matches(part, root, value, depth + 1));
  if (Array.isArray(value)) return value.every(item => matches(one.items, root, item, depth + 1));
  if (!isObject(value)) return true;
  const known = one.properties ?? {}, has = name => Object.hasOwn(value, name);
  return (one.required ?? []).every(has) && (allowsExtra(one) || Object.keys(value).every(name => Object.hasOwn(known, name)))
    && Object.keys(known).every(name => !has(name) || matches(known[name], root, value[name], depth + 1));
}

export function typeLabel(schema, root, depth = 0) {
  const one = resolveSchema(schema, root), many = choices(one);
  if (depth > 3) return "…";
  if (many) return [...new Set(many.map(part => typeLabel(part, root, depth + 1)))].join(" or ");
  if (one.enum) return "one of";
  if ("const" in one) return JSON.stringify(one.const);
  if (one.type === "array") return one.items ? `list of ${typeLabel(one.items, root, depth + 1)}` : "list";
  if (typeof one.type === "string") return one.type;
  return one.properties ? "object" : "anything";
}

/** The parameters as a list: name, type, limits and description; nested objects are indented. */
export function schemaView(schema, root, depth = 0) {
  const one = resolveSchema(schema, root), required = new Set(Array.isArray(one.required) ? one.required : []);
  const names = Object.keys(one.properties ?? {});
  if (!names.length) return depth ? null : el("p", { class: "dim small" }, allowsExtra(one) ? "Takes any arguments; the schema names none." : "Takes no arguments.");
  return el("dl", { class: "schema" }, names.map(name => {
    const field = resolveSchema(one.properties[name], root);
    return el("div", {},
      el("dt", {}, el("code", { class: "field-name" }, name), " ", el("span", { class: "dim small" }, typeLabel(field, root)),
        required.has(name) ? el("span", { class: "tag" }, "required") : null),
      el("dd", {}, field.description ? el("p", { class: "small" }, field.description) : null, limits(field), inside(field, root, depth)));
  }));
}

function limits(field) {
  const words = LIMITS.filter(([key]) => key in field).map(([key, label]) => `${label} ${field[key]}`);
  if (Array.isArray(field.enum)) words.push(field.enum.map(value => JSON.stringify(value)).join(" · "));
  if ("default" in field) words.push(`default ${JSON.stringify(field.default)}`);
  return words.length ? el("p", { class: "tiny dim mono" }, words.join(", ")) : null;
}

function inside(field, root, depth) {
  const inner = [field, field.items, ...(choices(field) ?? [])].filter(isObject)
    .map(one => resolveSchema(one, root)).find(one => one.properties);
  if (!inner) return null;
  if (depth >= 3) return el("p", { class: "tiny dim" }, "… nested deeper; see the schema as JSON.");
  return schemaView(inner, root, depth + 1);
}
