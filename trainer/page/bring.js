// What nobody has seen yet is as high as was guessed, so that a node which is scrolled to moves away while what is above
// it is drawn: it is brought to its place until it stays there.

const STILL = 4, MOST = 120; // frames: so many without a move are enough, and so many are all
let last = 0;

/** Brings a node to a place in the window: "start" or "center". */
export function bring(node, block) {
  const mine = last += 1;
  let top = NaN, still = 0, left = MOST;
  const look = () => {
    if (mine !== last || !node.isConnected) return;
    const now = node.getBoundingClientRect().top;
    still = Math.abs(now - top) < 1 ? still + 1 : 0;
    if (!still) node.scrollIntoView({ block });
    top = node.getBoundingClientRect().top;
    left -= 1;
    if (left && still < STILL) requestAnimationFrame(look);
  };
  look();
}
