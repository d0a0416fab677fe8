"""Whether a page fits its width."""

from __future__ import annotations

from tests.browser.page import Page

_OVERFLOWING = """(() => { const width = document.documentElement.clientWidth;
  if (document.documentElement.scrollWidth <= width) return [];
  return [...document.body.querySelectorAll("*")].filter(node => node.getBoundingClientRect().right > width + 1
    && !node.closest(".scroll, pre, nav")).map(node => node.tagName + "." + node.className).slice(0, 8).concat("page");
})()"""


def overflowing_elements(page: Page) -> list[str]:
    """Elements that extend beyond the page's width."""
    return list(page.js(_OVERFLOWING))
