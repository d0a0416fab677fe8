// What a policy was shown, from the run's own bytes: whole in the conversation, small where its tokens stand.

import { bytes, el } from "./dom.js";
import { picture } from "./data.js";

const TAGS = { image: "img", audio: "audio", video: "video" };
const TINY = 96; // pixels under which a picture is blown up: what a small model sees is a few pixels wide
const isMedium = part => part.kind in TAGS;
export const mediaOf = entry => (entry.parts ?? []).filter(isMedium);

/** A medium as large as it is worth looking at. */
export function medium(run, part, name) {
  const figure = el("figure", { class: "medium" }, el("figcaption", { class: "dim tiny" }, `${part.kind}, ${part.mime}, ${bytes(part.bytes)}`));
  picture(run, part.sha256, part.mime).then(src => {
    if (!src) throw new Error("no bytes");
    figure.prepend(part.kind === "image" ? image(src, name) : el(TAGS[part.kind], { src, controls: true, preload: "metadata", "aria-label": name }));
  }).catch(() => figure.append(el("span", { class: "dim tiny" }, " cannot be read")));
  return figure;
}

/** The same where its first token stands; what cannot be seen is named. */
export function small(run, part) {
  const node = el("span", { class: "stands", title: `${part.kind}, ${part.mime}` });
  if (part.kind !== "image") node.append(part.kind);
  else picture(run, part.sha256, part.mime).then(src => { if (src) node.append(image(src, "")); }).catch(() => node.append(part.kind));
  return node;
}

function image(src, alt) {
  const node = el("img", { src, alt, decoding: "async" });
  node.addEventListener("load", () => node.classList.toggle("tiny", node.naturalWidth < TINY), { once: true });
  return node;
}
