"""Runs axe-core in a page: it finds barriers for people who use a keyboard, a screen reader or strong contrast."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

from tests.browser.page import Page

FILE = Path(os.environ.get("MTRL_AXE") or Path(__file__).parents[2] / ".npm-peers/node_modules/axe-core/axe.min.js")
"""`make peers` installs it; MTRL_AXE may name another."""
_RUN = """axe.run(document, {resultTypes: ["violations"]}).then(({violations}) => violations
  .flatMap(({id, help, nodes}) => nodes.slice(0, 4).map(({html}) => `${id} (${help}): ${html.slice(0, 160)}`)))"""


@cache
def _script() -> str:
    if not FILE.is_file():
        raise FileNotFoundError(f"{FILE} is missing: run `rm -rf .npm-peers && make peers`, or name a file in MTRL_AXE")
    return FILE.read_text(encoding="utf-8")


def find_barriers(page: Page) -> list[str]:
    """Violations of axe's rules and of its best practices, from minor to critical."""
    page.js(f"if (!window.axe) {{ {_script()}\n }} 0")
    return list(page.js(_RUN))
