"""Tests long rollouts in the web UI: permalinks to turns and tokens, keys, ledgers and lazy drawing."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.browser.long_run import (
    BRANCHES,
    EXCLUDED_TOKENS,
    MANY_TOKENS,
    MANY_TURNS,
    TOKENS,
    TURNS,
    TWO_LEDGERS,
    write_long_run,
)
from tests.browser.page import NARROW, WIDE, Page
from tests.browser.runs_stage import serve_runs

AT_TOP = "Math.abs(at.getBoundingClientRect().top - parseFloat(getComputedStyle(at).scrollMarginTop)) < 3"
STAYS = """new Promise(done => { let left = 20; const look = () => { const at = document.querySelector(%r);
  (left -= 1) ? requestAnimationFrame(look) : done(Boolean(at && %s)); }; look(); })"""
"""True if the element is still in place some frames later."""
IN_SIGHT = "at.getBoundingClientRect().top > 0 && at.getBoundingClientRect().bottom < innerHeight"


@pytest.fixture(scope="module")
def run_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serve_runs(write_long_run(tmp_path_factory.mktemp("runs") / "long")) as url:
        yield f"{url}#/long"


def open_fresh(page: Page, url: str) -> None:
    """Opens an address in a fresh page, as from a link."""
    page.open("about:blank#")
    page.open(url)
    page.until("!!document.querySelector('.view .entry')")


@pytest.mark.parametrize(("turn", "size"), [(40, WIDE), (51, NARROW)])
def test_permalink_scrolls_to_its_turn(page: Page, run_url: str, turn: int, size: tuple[int, int]) -> None:
    page.look(size=size)
    open_fresh(page, f"{run_url}/rollouts/{MANY_TURNS}?turn={turn}")
    selector = f".entry[data-turn='{turn}']"
    page.until(f"(at => at && {AT_TOP})(document.querySelector({selector!r}))")
    page.until(STAYS % (selector, AT_TOP))


def test_keys_move_from_turn_to_turn(page: Page, run_url: str) -> None:
    open_fresh(page, f"{run_url}/rollouts/{MANY_TURNS}")
    assert page.count(".entry[data-turn]") == TURNS
    for key, turn in [("n", 0), ("n", 1), ("n", 2), ("p", 1)]:
        page.press(key)
        page.until(f"new URLSearchParams(location.hash.split('?')[1]).get('turn') === '{turn}'")
        page.until(f"(at => {AT_TOP})(document.querySelector('.entry[data-turn=\"{turn}\"]'))")


def test_address_of_a_token_has_its_ledger(page: Page, run_url: str) -> None:
    open_fresh(page, f"{run_url}/rollouts/{TWO_LEDGERS}")
    page.until("document.querySelector('.mode[aria-pressed=true]')?.innerText === '2'")
    page.click(".mode[aria-pressed]", "1")
    page.press("ArrowRight")
    page.until("/token=0/.test(location.hash) && /ledger=1/.test(location.hash)")
    page.open("about:blank#")
    page.open(f"{run_url}/rollouts/{TWO_LEDGERS}?token=3&ledger=1")
    page.until("!!document.querySelector('#t3.on')")
    assert page.text(".mode[aria-pressed=true]") == "1"


def test_branches_of_an_agents_rollout_have_names(page: Page, run_url: str) -> None:
    open_fresh(page, f"{run_url}/rollouts/{BRANCHES}")
    page.until("document.querySelector('.mode[aria-pressed=true]')?.innerText === 'main line'")
    page.click(".mode[aria-pressed]", "fork of turn 0")
    page.sees("changed by the agent: arguments", ".entry[data-turn='0']")


def test_turn_is_shown_in_its_ledger_and_what_is_missing_is_reported(page: Page, run_url: str) -> None:
    open_fresh(page, f"{run_url}/rollouts/{TWO_LEDGERS}?turn=1")
    page.until("document.querySelector('.entry[data-turn=\"1\"]')")
    assert page.text(".mode[aria-pressed=true]") == "1"
    for params, expected in (
        ("turn=9", "no turn 9: it has 4 turns"), ("ledger=3", "no ledger 3: it has 2"), ("token=9999", "no token 9999"),
    ):  # fmt: skip
        open_fresh(page, f"{run_url}/rollouts/{TWO_LEDGERS}?{params}")
        page.sees(expected, "[role=alert]")


def test_zero_weight_token_shows_why_it_is_not_trained(page: Page, run_url: str) -> None:
    start = "Number(document.querySelector('.entry[data-turn=\"2\"] .t').dataset.at)"
    open_fresh(page, f"{run_url}/rollouts/{TWO_LEDGERS}")
    page.until("!!document.querySelector('.entry[data-turn=\"2\"] .t')")
    first = page.js(start)
    for token, expected in (
        (first, "Not trained: the policy wrote it, but a plug-in excluded it from training"),
        (first + EXCLUDED_TOKENS, "Trained: "),
    ):
        open_fresh(page, f"{run_url}/rollouts/{TWO_LEDGERS}?token={token}")
        page.sees(expected, ".inspector")
    assert "plug-in" not in page.text(".inspector .because")


def test_long_rollout_is_drawn_only_where_visible(page: Page, run_url: str) -> None:
    open_fresh(page, f"{run_url}/rollouts/{MANY_TOKENS}")
    page.until("document.querySelectorAll('.t').length > 100")
    page.press("4")
    page.until("document.querySelector('.mode[data-mode=surprise]').ariaChecked === 'true'")
    open_fresh(page, f"{run_url}/rollouts/{MANY_TOKENS}?token={TOKENS - 900}")
    page.sees(f"token {TOKENS - 900}", ".inspector")
    page.until(STAYS % (f"#t{TOKENS - 900}.on", IN_SIGHT))
    assert page.count(".t") < 12_000, "the rest is text"
    assert page.js("document.querySelector('.entries').textContent.length") > TOKENS


def test_long_siblings_are_shown_side_by_side(page: Page, run_url: str) -> None:
    page.open(f"{run_url}/group/1-0-2")
    page.sees("Reward", ".differences")
    page.until("document.querySelectorAll('.diverged .t.pale').length > 99")
    assert page.count(".t") < 12_000
