"""Accessibility checks of a page: contrast, horizontal overflow, and names of controls."""

from __future__ import annotations

from tests.browser.page import Page

CONTRAST = 4.5
"""Minimum contrast of text in WCAG 2, level AA."""

_LOW_CONTRAST = """(() => {
  const canvas = new OffscreenCanvas(1, 1), pen = canvas.getContext("2d", {willReadFrequently: true});
  const seen = {};
  const rgba = colour => seen[colour] ??= (pen.clearRect(0, 0, 1, 1), pen.fillStyle = colour, pen.fillRect(0, 0, 1, 1),
    [...pen.getImageData(0, 0, 1, 1).data]);
  const over = (top, under) => [0, 1, 2].map(i => top[i] * top[3] / 255 + under[i] * (1 - top[3] / 255)).concat(255);
  const behind = node => { const stack = []; for (let at = node; at; at = at.parentElement)
      stack.push(rgba(getComputedStyle(at).backgroundColor));
    return stack.reverse().reduce((under, top) => over(top, under), rgba("canvas")); };
  const light = c => { const [r, g, b] = c.map(v => (v /= 255) <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4);
    return .2126 * r + .7152 * g + .0722 * b; };
  const ratio = (a, b) => { const [x, y] = [light(a), light(b)].sort((m, n) => n - m); return (x + .05) / (y + .05); };
  const found = [], walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let text; text = walk.nextNode();) { const node = text.parentElement;
    if (!text.data.trim() || !node.checkVisibility({opacityProperty: true})) continue;
    if (node.closest(".unseen, :disabled")) continue;
    const under = behind(node), own = over(rgba(getComputedStyle(node).color), under), has = ratio(own, under);
    if (has < %f) found.push(has.toFixed(2) + " " + text.data.trim().slice(0, 40)); }
  return [...new Set(found)]; })()"""

_OVERFLOWING = """(() => { const width = document.documentElement.clientWidth;
  if (document.documentElement.scrollWidth <= width) return [];
  return [...document.body.querySelectorAll("*")].filter(node => node.getBoundingClientRect().right > width + 1
    && !node.closest(".scroll, pre, nav")).map(node => node.tagName + "." + node.className).slice(0, 8).concat("page");
})()"""

_UNNAMED = """[...document.querySelectorAll("button, a[href], input, select, textarea, summary")]
  .filter(node => node.checkVisibility() && !(node.textContent.trim() || node.labels?.length
    || node.getAttribute("aria-label") || node.getAttribute("aria-labelledby") || node.title))
  .map(node => node.outerHTML.slice(0, 120))"""


def low_contrast_texts(page: Page) -> list[str]:
    """Texts whose contrast with the background is too low, with their contrast."""
    return list(page.js(_LOW_CONTRAST % CONTRAST))


def overflowing_elements(page: Page) -> list[str]:
    """Elements that extend beyond the page's width."""
    return list(page.js(_OVERFLOWING))


def unnamed_controls(page: Page) -> list[str]:
    """Controls without an accessible name."""
    return list(page.js(_UNNAMED))
