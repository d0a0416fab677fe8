"""No view of the web UIs has a barrier for a keyboard or a screen reader, light or dark, as axe finds them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.browser.gateway_stage import GATEWAY
from tests.browser.page import NARROW, Page
from tests.browser.runs_stage import ODD_RUNS, RUNS, STARTING_RUN
from tests.browser.views import View

FILE = Path(os.environ.get("MTRL_AXE") or Path(__file__).parents[2] / ".npm-peers/node_modules/axe-core/axe.min.js")
"""`make peers` installs it; MTRL_AXE may name another."""
RUN_AXE = """axe.run(document, {resultTypes: ["violations"]}).then(({violations}) => violations
  .flatMap(({id, help, nodes}) => nodes.slice(0, 4).map(({html}) => `${id} (${help}): ${html.slice(0, 160)}`)))"""


def find_barriers(page: Page) -> list[str]:
    """Violations of axe's rules and of its best practices, from minor to critical."""
    assert FILE.is_file(), f"{FILE} is missing: run `rm -rf .npm-peers && make peers`, or name a file in MTRL_AXE"
    page.js(f"if (!window.axe) {{ {FILE.read_text(encoding='utf-8')}\n }} 0")
    return list(page.js(RUN_AXE))


OVERFLOWING = """(() => { const width = document.documentElement.clientWidth;
  if (document.documentElement.scrollWidth <= width) return [];
  return [...document.body.querySelectorAll("*")].filter(node => node.getBoundingClientRect().right > width + 1
    && !node.closest(".scroll, pre, nav")).map(node => node.tagName + "." + node.className).slice(0, 8).concat("page");
  })()"""
"""Elements that extend beyond the page's width."""


@pytest.fixture(scope="module")
def runs_url() -> Iterator[str]:
    with RUNS.serve() as url:
        yield url


@pytest.fixture(scope="module")
def odd_urls() -> Iterator[dict[View, str]]:
    with ODD_RUNS.serve() as odd, STARTING_RUN.serve() as starting:
        yield dict.fromkeys(ODD_RUNS.views, odd) | dict.fromkeys(STARTING_RUN.views, starting)


@pytest.fixture(scope="module")
def gateway_url() -> Iterator[str]:
    with GATEWAY.serve() as url:
        yield url


def assert_no_barriers(page: Page, view: View, url: str) -> None:
    page.look("light", view.size)
    view.show(page, url)
    assert find_barriers(page) == []
    page.look("dark", view.size)
    assert find_barriers(page) == []
    page.look("dark", NARROW)
    assert page.js(OVERFLOWING) == []


@pytest.mark.parametrize("view", RUNS.views, ids=lambda view: view.name)
def test_view_of_runs_has_no_barrier(page: Page, runs_url: str, view: View) -> None:
    assert_no_barriers(page, view, runs_url)


@pytest.mark.parametrize("view", [*STARTING_RUN.views, *ODD_RUNS.views], ids=lambda view: view.name)
def test_view_without_data_has_no_barrier(page: Page, odd_urls: dict[View, str], view: View) -> None:
    assert_no_barriers(page, view, odd_urls[view])


@pytest.mark.parametrize("view", GATEWAY.views, ids=lambda view: view.name)
def test_view_of_the_gateway_has_no_barrier(page: Page, gateway_url: str, view: View) -> None:
    assert_no_barriers(page, view, gateway_url)


def test_dialog_of_keys_has_no_barrier_and_returns_the_focus(page: Page, runs_url: str) -> None:
    page.open(f"{runs_url}#/cities/compare/6-7")
    page.until("document.querySelectorAll('.data tbody tr').length > 10")
    page.js("document.querySelector('button[aria-label=Keys]').focus()")
    page.press("Enter")
    page.sees("what changed since the step before", "dialog")
    assert find_barriers(page) == []
    page.press("Escape")
    page.until("!document.querySelector('dialog') && document.activeElement.ariaLabel === 'Keys'")
