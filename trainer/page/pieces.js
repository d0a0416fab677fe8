// A rollout may have more tokens than a page can hold as nodes: an entry's are text at first, and come to stand each by
// itself, a piece at a time, before they are seen.

import { el, put } from "./dom.js";

const SIZE = 400, LONGEST = 1600; // tokens of a piece: it ends with a line, where one ends in time

/** `paint` makes nodes of a piece's tokens. */
export function pieces(paint) {
  const held = new Map();
  const draw = one => { if (one.drawn) return; one.drawn = true; watch.unobserve(one.node); paint(one.node, one.tokens); };
  const watch = new IntersectionObserver(seen => seen.filter(one => one.isIntersecting).forEach(one => draw(held.get(one.target))), { rootMargin: "100%" });
  const add = tokens => {
    const one = { node: el("span", { class: "piece" }, plain(tokens)), tokens, drawn: false };
    held.set(one.node, one);
    watch.observe(one.node);
    return one.node;
  };
  return {
    fill: (parent, tokens) => put(parent, cut(tokens).map(add)),
    /** What is drawn is drawn anew. */
    again: () => held.forEach(one => one.drawn && paint(one.node, one.tokens)),
    /** Draws the piece that holds a token, wherever it is. */
    show: token => held.forEach(one => { if (one.tokens[0].at <= token.at && token.at <= one.tokens.at(-1).at) draw(one); }),
    clear: () => { watch.disconnect(); held.clear(); },
  };
}

function cut(tokens) {
  const found = [];
  let from = 0;
  tokens.forEach((token, place) => {
    const many = place + 1 - from;
    if (many < LONGEST && !(many >= SIZE && token.piece?.endsWith("\n"))) return;
    found.push(tokens.slice(from, place + 1));
    from = place + 1;
  });
  if (from < tokens.length) found.push(tokens.slice(from));
  return found;
}
const plain = tokens => tokens.map(token => token.piece ?? `${token.id} `).join("").replaceAll("\n", "↵\n");
