"""A rollout as long as they get: it opens, and an address leads to its turn and its token, wherever these are."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.browser.long_run import ANEW, LEFT_OUT_OF, MANY_TOKENS, MANY_TURNS, TOKENS, TURNS, long_run
from tests.browser.page import NARROW, WIDE, Page
from tests.browser.runs_stage import shown

AT_TOP = "Math.abs(at.getBoundingClientRect().top - parseFloat(getComputedStyle(at).scrollMarginTop)) < 3"
STAYS = """new Promise(done => { let left = 20; const look = () => { const at = document.querySelector(%r);
  (left -= 1) ? requestAnimationFrame(look) : done(Boolean(at && %s)); }; look(); })"""
"""Whether it is there some frames later as well."""
IN_SIGHT = "at.getBoundingClientRect().top > 0 && at.getBoundingClientRect().bottom < innerHeight"


@pytest.fixture(scope="module")
def at(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with shown(long_run(tmp_path_factory.mktemp("runs") / "long")) as url:
        yield f"{url}#/long"


def opened(page: Page, url: str) -> None:
    """From its address, as somebody has it who was sent it."""
    page.open("about:blank#")
    page.open(url)
    page.until("!!document.querySelector('.view .entry')")


@pytest.mark.parametrize("size", [WIDE, NARROW])
@pytest.mark.parametrize("turn", [1, 40, 51])
def test_a_permalink_leads_to_its_turn_however_much_stands_above_it(
    page: Page, at: str, turn: int, size: tuple[int, int]
) -> None:
    page.look(size=size)
    opened(page, f"{at}/rollouts/{MANY_TURNS}?turn={turn}")
    found = f".entry[data-turn='{turn}']"
    page.until(f"(at => at && {AT_TOP})(document.querySelector({found!r}))")
    page.until(STAYS % (found, AT_TOP))


@pytest.mark.parametrize("size", [WIDE, NARROW])
def test_the_keys_walk_from_turn_to_turn_and_stop_at_nothing_else(page: Page, at: str, size: tuple[int, int]) -> None:
    page.look(size=size)
    opened(page, f"{at}/rollouts/{MANY_TURNS}")
    assert page.count(".entry[data-turn]") == TURNS
    for key, turn in [("n", 0), ("n", 1), ("n", 2), ("p", 1)]:
        page.press(key)
        page.until(f"new URLSearchParams(location.hash.split('?')[1]).get('turn') === '{turn}'")
        page.until(f"(at => {AT_TOP})(document.querySelector('.entry[data-turn=\"{turn}\"]'))")


def test_a_ledger_that_the_policy_left_is_in_the_address_of_its_tokens(page: Page, at: str) -> None:
    opened(page, f"{at}/rollouts/{ANEW}")
    page.until("document.querySelector('.mode[aria-pressed=true]')?.innerText === '2'")
    page.click(".mode[aria-pressed]", "1")
    page.press("ArrowRight")
    page.until("/token=0/.test(location.hash) && /ledger=1/.test(location.hash)")
    page.open("about:blank#")
    page.open(f"{at}/rollouts/{ANEW}?token=3&ledger=1")
    page.until("!!document.querySelector('#t3.on')")
    assert page.text(".mode[aria-pressed=true]") == "1"


@pytest.mark.parametrize(("turn", "ledger"), [(0, "1"), (1, "1"), (2, "2")])
def test_a_turn_is_found_in_the_ledger_that_holds_it(page: Page, at: str, turn: int, ledger: str) -> None:
    opened(page, f"{at}/rollouts/{ANEW}?turn={turn}")
    page.until(f"document.querySelector('.entry[data-turn=\"{turn}\"]')")
    assert page.text(".mode[aria-pressed=true]") == ledger


@pytest.mark.parametrize(
    ("asked", "said"),
    [("turn=9", "no turn 9: it has 4 turns"), ("ledger=3", "no ledger 3: it has 2"), ("token=9999", "no token 9999")],
)
def test_what_an_address_names_and_the_rollout_has_not_is_said(page: Page, at: str, asked: str, said: str) -> None:
    opened(page, f"{at}/rollouts/{ANEW}?{asked}")
    page.sees(said, "[role=alert]")


def test_a_token_of_no_weight_says_why_it_is_not_trained(page: Page, at: str) -> None:
    start = "Number(document.querySelector('.entry[data-turn=\"2\"] .t').dataset.at)"
    opened(page, f"{at}/rollouts/{ANEW}")
    page.until("!!document.querySelector('.entry[data-turn=\"2\"] .t')")
    first = page.js(start)
    for token, said in (
        (first, "Not trained: the policy wrote it, but a plug-in left it out"),
        (first + LEFT_OUT_OF, "Trained: "),
    ):
        opened(page, f"{at}/rollouts/{ANEW}?token={token}")
        page.sees(said, ".inspector")
    assert "plug-in" not in page.text(".inspector .because")


def test_a_rollout_of_very_many_tokens_is_drawn_where_it_is_seen(page: Page, at: str) -> None:
    opened(page, f"{at}/rollouts/{MANY_TOKENS}")
    page.until("document.querySelectorAll('.t').length > 100")
    page.press("4")
    page.until("document.querySelector('.mode[data-mode=surprise]').ariaChecked === 'true'")
    opened(page, f"{at}/rollouts/{MANY_TOKENS}?token={TOKENS - 900}")
    page.sees(f"token {TOKENS - 900}", ".inspector")
    page.until(STAYS % (f"#t{TOKENS - 900}.on", IN_SIGHT))
    assert page.count(".t") < 12_000, "the rest is text"
    assert page.js("document.querySelector('.entries').textContent.length") > TOKENS


def test_siblings_of_very_many_tokens_stand_side_by_side(page: Page, at: str) -> None:
    page.open(f"{at}/group/1-0-2")
    page.sees("Reward", ".apart")
    page.until("document.querySelectorAll('.parted .t.pale').length > 99")
    assert page.count(".t") < 12_000
