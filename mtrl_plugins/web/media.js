// Images, audio and video of a rollout: large in the conversation, small at their tokens.

import { bytes, el } from "./dom.js";
import { mediaUrl } from "./data.js";

const TAGS = { image: "img", audio: "audio", video: "video" };
const SMALL_PIXELS = 96; // images narrower than this are enlarged: those of small models are a few pixels wide
const isMedia = part => part.kind in TAGS;
export const mediaOf = entry => (entry.parts ?? []).filter(isMedia);

/** An image, audio or video player with a caption. */
export function mediaFigure(run, part, name) {
  const figure = el("figure", { class: "media" }, el("figcaption", { class: "dim tiny" }, `${part.kind}, ${part.mime}, ${bytes(part.bytes)}`));
  mediaUrl(run, part.sha256, part.mime).then(src => {
    if (!src) throw new Error("no bytes");
    figure.prepend(part.kind === "image" ? image(src, name) : el(TAGS[part.kind], { src, controls: true, preload: "metadata", "aria-label": name }));
  }).catch(() => figure.append(el("span", { class: "dim tiny" }, " cannot be read")));
  return figure;
}

/** A thumbnail of an image, or the kind of other media. */
export function mediaThumbnail(run, part) {
  const node = el("span", { class: "thumbnail", title: `${part.kind}, ${part.mime}` });
  if (part.kind !== "image") node.append(part.kind);
  else mediaUrl(run, part.sha256, part.mime).then(src => { if (src) node.append(image(src, "")); }).catch(() => node.append(part.kind));
  return node;
}

function image(src, alt) {
  const node = el("img", { src, alt, decoding: "async" });
  node.addEventListener("load", () => node.classList.toggle("tiny", node.naturalWidth < SMALL_PIXELS), { once: true });
  return node;
}
