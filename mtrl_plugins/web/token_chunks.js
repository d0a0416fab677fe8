// Draws tokens lazily: a rollout may have more tokens than a page can hold as nodes, so chunks of tokens are plain text
// until they are about to be visible.

import { el, put } from "./dom.js";

const CHUNK_TOKENS = 400, MAX_CHUNK_TOKENS = 1600; // a chunk ends at the first line end between these sizes

/** Chunks of tokens; `paint` replaces a chunk's text by nodes. */
export function tokenChunks(paint) {
  const chunks = new Map();
  const draw = chunk => { if (chunk.drawn) return; chunk.drawn = true; observer.unobserve(chunk.node); paint(chunk.node, chunk.tokens); };
  const observer = new IntersectionObserver(entries => entries.filter(chunk => chunk.isIntersecting).forEach(chunk => draw(chunks.get(chunk.target))), { rootMargin: "100%" });
  const add = tokens => {
    const chunk = { node: el("span", { class: "chunk" }, plainText(tokens)), tokens, drawn: false };
    chunks.set(chunk.node, chunk);
    observer.observe(chunk.node);
    return chunk.node;
  };
  return {
    fill: (parent, tokens) => put(parent, splitChunks(tokens).map(add)),
    /** Repaints the chunks that are drawn. */
    again: () => chunks.forEach(chunk => chunk.drawn && paint(chunk.node, chunk.tokens)),
    /** Draws the chunk of a token. */
    show: token => chunks.forEach(chunk => { if (chunk.tokens[0].at <= token.at && token.at <= chunk.tokens.at(-1).at) draw(chunk); }),
    clear: () => { observer.disconnect(); chunks.clear(); },
  };
}

function splitChunks(tokens) {
  const chunks = [];
  let start = 0;
  tokens.forEach((token, index) => {
    const length = index + 1 - start;
    if (length < MAX_CHUNK_TOKENS && !(length >= CHUNK_TOKENS && token.piece?.endsWith("\n"))) return;
    chunks.push(tokens.slice(start, index + 1));
    start = index + 1;
  });
  if (start < tokens.length) chunks.push(tokens.slice(start));
  return chunks;
}
const plainText = tokens => tokens.map(token => token.piece ?? `${token.id} `).join("").replaceAll("\n", "↵\n");
