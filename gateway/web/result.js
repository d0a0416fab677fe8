// Shows a call's result, part by part. Images are shown; other media can be saved.
import { bytes, count, el, number, seconds } from "./dom.js";
import { MEANING, operatorNote, outcomeChip, phaseStrip } from "./call_charts.js";

const SHOWN = /^image\/(png|jpeg|gif|webp|avif|bmp)$/;
const LONG = 20000;

/** A complete result, as returned with `layout: parts`. */
export function resultView(result) {
  return el("div", { class: "stack result", data: { outcome: result.outcome } },
    el("div", { class: "row centre" }, outcomeChip(result.outcome),
      el("span", { class: "small number" }, seconds(result.elapsed_s)),
      result.attempts > 1 ? el("span", { class: "small dim" }, count(result.attempts, "attempt")) : null,
      result.reward !== null ? el("span", { class: "small number" }, `reward ${number(result.reward)}`) : null,
      result.done ? el("span", { class: "tag" }, "ends the rollout") : null),
    result.outcome === "ok" ? null : el("div", { class: "notice small stack", data: { outcome: result.outcome } },
      el("p", {}, MEANING[result.outcome]), operatorNote(result)),
    (result.parts ?? []).length ? result.parts.map(partView) : el("p", { class: "dim small" }, "The result is empty."),
    result.structured !== null && result.structured !== undefined ? fold("Structured", pretty(result.structured)) : null,
    Object.keys(result.metrics ?? {}).length ? fold("Metrics", pretty(result.metrics)) : null,
    Object.keys(result.meta ?? {}).length ? fold("_meta", pretty(result.meta)) : null,
    phaseStrip(result.timing ?? {}, result.elapsed_s));
}

export function partView(part) {
  const held = typeof part.data === "string" ? part.data : null;
  if (part.type === "text") return longText(part.text);
  if (part.type === "image" && held && SHOWN.test(part.mime)) return imageElement(part);
  if (part.type === "resource") return el("div", { class: "stack part" },
    el("p", { class: "small row" }, el("span", { class: "tag" }, part.mime ?? "resource"), el("code", {}, part.uri),
      part.name ? el("span", { class: "dim" }, part.name) : null),
    part.description ? el("p", { class: "small dim" }, part.description) : null,
    typeof part.text === "string" ? longText(part.text) : null, held ? save(part, part.name ?? "resource") : null);
  return el("p", { class: "small row part" }, el("span", { class: "tag" }, part.mime ?? part.type), held ? save(part, part.type)
    : el("span", { class: "dim" }, "not kept here"));
}

function imageElement(part) {
  const image = el("img", { src: `data:${part.mime};base64,${part.data}`, alt: "Image in the tool's result" });
  const words = el("figcaption", { class: "tiny dim" }, `${part.mime}, ${bytes(part.data.length * 3 / 4)}`);
  image.addEventListener("load", () => words.prepend(`${image.naturalWidth} × ${image.naturalHeight}, `));
  return el("figure", { class: "part" }, image, words);
}

function longText(text) {
  if (text === "") return el("p", { class: "dim small" }, "(an empty text)");
  const node = el("pre", { class: "wrap part", tabindex: "0", "aria-label": "Text of the answer" }, text.slice(0, LONG));
  if (text.length <= LONG) return node;
  const more = el("button", { type: "button", class: "quiet", on: { click: () => { node.textContent = text; more.remove(); } } },
    `Show all ${count(text.length, "character")}`);
  return el("div", { class: "stack" }, node, el("div", {}, more));
}

function save(part, name) {
  const act = () => {
    const data = Uint8Array.from(atob(part.data), sign => sign.charCodeAt(0));
    // Saved as plain bytes, so that the browser never opens it with this page's origin.
    const link = el("a", { href: URL.createObjectURL(new Blob([data], { type: "application/octet-stream" })), download: name });
    link.click();
    URL.revokeObjectURL(link.href);
  };
  return el("button", { type: "button", on: { click: act } }, `Save ${bytes(part.data.length * 3 / 4)}`);
}

export const pretty = value => el("pre", { class: "wrap", tabindex: "0" }, JSON.stringify(value, null, 2));
export const fold = (title, ...inside) => el("details", {}, el("summary", {}, title), inside);

/** Arguments, indented if they are valid JSON, else unchanged. */
export function argumentsText(written) {
  try { return JSON.stringify(JSON.parse(written), null, 2); } catch { return written; }
}

/** A button that copies a text and confirms it. */
export function copyButton(text) {
  const button = el("button", { type: "button", class: "quiet", on: { click: async () => {
    await navigator.clipboard.writeText(text()).then(() => { button.textContent = "Copied"; }, () => { button.textContent = "Select it and copy"; });
  } } }, "Copy");
  return button;
}
