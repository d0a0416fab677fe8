// Scrolls to a node whose position still changes: content above it that has not been drawn has only an estimated height,
// so scrolling is repeated until the node stays in place.

const STILL_FRAMES = 4, MAX_FRAMES = 120; // frames without a move that end it, and frames at most
let last = 0;

/** Scrolls a node to the "start" or "center" of the window; nowhere if it is not drawn yet. */
export function scrollIntoPlace(node, block) {
  const call = last += 1;
  let top = NaN, still = 0, framesLeft = MAX_FRAMES;
  const check = () => {
    if (call !== last || !node?.isConnected) return;
    const now = node.getBoundingClientRect().top;
    still = Math.abs(now - top) < 1 ? still + 1 : 0;
    if (!still) node.scrollIntoView({ block });
    top = node.getBoundingClientRect().top;
    framesLeft -= 1;
    if (framesLeft && still < STILL_FRAMES) requestAnimationFrame(check);
  };
  check();
}
