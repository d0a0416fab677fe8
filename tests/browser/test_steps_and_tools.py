"""Tests the views of steps and siblings in a browser: links, keys, sums, and names that are hostile."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import pytest

from tests.browser.page import Page
from tests.browser.runs_stage import serve_runs
from tests.browser.sample_run import HOSTILE, write_sample_run
from tests.plugins.web.test_web_steps import make_rollout, tool_entry
from trainer.storage.rollout_file import RolloutWriter

HOSTILE_GROUP = "2-0-1"
"""The sample run's group in which rollout 20 wrote hostile text."""
TABS = 80
"""Presses of Tab within which a part of a page is reached."""


@pytest.fixture(scope="module")
def sample_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_sample_run(tmp_path_factory.mktemp("runs") / "over", steps=12)


@pytest.fixture(scope="module")
def url(sample_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    hostile = tmp_path_factory.mktemp("runs") / "hostile"
    hostile.mkdir()
    with RolloutWriter(hostile) as writer:
        for step in (1, 2):
            for index, name in enumerate((HOSTILE, "plain")):
                reward = {"right": float(step == index)}
                call = tool_entry(name, 0.5)
                writer.add(make_rollout(step, call, kind=name, source=f"{name}:1", index=index, rewards=reward))
    with serve_runs(sample_run, hostile) as url:
        yield url


HAS_OUTLINE = "getComputedStyle(document.activeElement).outlineStyle !== 'none'"
REACHABLE = """[...document.querySelectorAll("a[href], button, input, select, summary, [tabindex='0']")]
  .filter(node => node.tabIndex >= 0 && node.checkVisibility() && !node.matches(":disabled, .unseen"))"""


def tab_to(page: Page, selector: str) -> None:
    """Presses Tab until the focus, which is seen at each stop, is on an element that matches."""
    for _ in range(TABS):
        page.press("Tab")
        assert page.js(HAS_OUTLINE), page.js("document.activeElement.outerHTML.slice(0, 200)")
        if page.js(f"document.activeElement.matches({selector!r})"):
            return
    raise AssertionError(f"{TABS} presses of Tab do not reach {selector}")


def test_keys_alone_lead_from_a_curve_to_the_cause_and_to_a_rollout(page: Page, url: str) -> None:
    page.open(f"{url}#/over")
    page.until("document.querySelectorAll('.chart path').length > 12")
    tab_to(page, ".plot")
    for _ in range(8):
        page.press("ArrowRight")
    page.sees("step 7", ".when")
    assert page.js("document.activeElement.ariaValueText").startswith("step 7: ")
    page.press("Enter")
    page.until("location.hash === '#/over/rollouts?step=7' && document.activeElement.matches('main')")
    tab_to(page, ".summary a")
    page.press("Enter")
    page.sees("What changed from step 6 to step 7", "h1")
    page.until("document.activeElement.matches('main[aria-label^=\"Steps 6 and 7\"]')")
    tab_to(page, ".causes a[aria-label^='an example of step 7']")
    page.press("Enter")
    page.until("location.hash.startsWith('#/over/rollouts/') && document.querySelector('.inspector')")


@pytest.mark.parametrize(
    ("view", "last"), [("rollouts?step=7", ".summary a"), ("rollouts/40", ".view"), ("group/11-0-2", ".view")]
)
def test_tab_reaches_everything_that_can_be_used(page: Page, url: str, view: str, last: str) -> None:
    """`last` is what comes into the view last."""
    page.open(f"{url}#/over/{view}")
    page.until(f"document.querySelector('{last}')")
    page.until("document.querySelector('.view')?.innerText.length > 200 && !document.querySelector('.choices:empty')")
    wanted = page.js(f"{REACHABLE}.forEach((node, place) => {{ node.dataset.stop = place; }}), {REACHABLE}.length")
    stops = set()
    for _ in range(wanted + 1):
        page.press("Tab")
        stop, seen = page.js(f"[document.activeElement.dataset.stop, {HAS_OUTLINE}]")
        assert seen or stop is None, page.js("document.activeElement.outerHTML.slice(0, 200)")
        stops.add(stop)
    missed = page.js(
        f"{REACHABLE}.filter(node => !{sorted(filter(None, stops))}.includes(node.dataset.stop))"
        ".map(node => node.outerHTML.slice(0, 200))"
    )
    assert missed == []


def test_table_of_a_step_leads_to_what_changed(page: Page, url: str) -> None:
    page.open(f"{url}#/over/rollouts?step=7")
    page.click(".summary a", "what changed since step 6")
    page.sees("What changed from step 6 to step 7", "h1")
    page.until("document.querySelectorAll('.causes li').length > 1")
    page.sees("16 of 16 rollouts scored in step 6, then 16 of 16 rollouts scored in step 7")
    for table in ("Kinds of task", "Endings", "Outcomes of tool calls", "Reward, lengths and times", "Tool calls"):
        assert page.count(f"section.data[aria-label='{table}'] tbody tr")
    page.sees("points", "section.data[aria-label='Failures']")
    spread = page.js("document.querySelector('.histogram').getAttribute('aria-label')")
    assert sum(int(many) for many in spread.partition(": ")[2].split(", ")) == 16
    page.click(".causes a[aria-label^='an example of step 7']")
    page.until("location.hash.startsWith('#/over/rollouts/')")


def test_click_on_a_curve_opens_the_rollouts_of_its_step(page: Page, url: str) -> None:
    page.open(f"{url}#/over/rollouts?step=1")
    page.sees("16 rollouts", ".summary")
    page.press("g")
    page.until("document.querySelectorAll('.chart path').length > 12")
    # The page may still grow: what counts is the step that was shown when the pointer went up.
    page.js(
        "addEventListener('pointerup', () => { window.shown = document.querySelector('.when').textContent; }, true)"
    )
    page.click(".plot")
    page.until("/step \\d+/.test(window.shown)")
    page.until("location.hash === `#/over/rollouts?${window.shown.replace(' ', '=')}`")


def test_siblings_are_seen_as_a_heat_map_and_by_their_most_pushed_tokens(page: Page, url: str) -> None:
    page.open(f"{url}#/over/group/11-0-2?heat=logprob")
    page.until("document.querySelectorAll('.heat-grid tbody tr').length === 4")
    assert page.js("[...document.querySelectorAll('.heat-grid a')].every(cell => /: logprob .0/.test(cell.ariaLabel))")
    page.choose("select[name=columns]", "parts")
    page.until("document.querySelectorAll('.heat-grid thead th').length > 20")
    page.until("location.hash.includes('columns=parts')")
    page.sees("Answer", ".differences")
    assert "System message" not in page.text(".siblings-all"), "they are shown from where they diverge"
    page.open("about:blank#")
    page.open(f"{url}#/over/group/{HOSTILE_GROUP}")
    page.sees("Tokens that were pushed most")
    page.click("[aria-label='Pushed down'] tbody th a")
    page.until("location.hash.includes('by=advantage')")
    page.sees("Trained", ".inspector")


def test_hostile_text_and_names_stay_text(page: Page, url: str) -> None:
    for view, times in (("compare/1-2", 3), (f"rollouts?tool={quote(HOSTILE)}", 1)):
        page.open("about:blank#")
        page.open(f"{url}#/hostile/{view}")
        page.until(f"document.querySelector('main').innerText.split('<script>').length > {times}")
        assert page.count("main script, main img") == 0 and page.js("document.title") != "run"
    for view, last in ((f"group/{HOSTILE_GROUP}", ".pushed"), ("rollouts", ".view"), ("rollouts/20", ".message")):
        page.open(f"{url}#/over/{view}")
        page.until(f"document.querySelector('{last}')")
        assert page.count("main script, main img[onerror]") == 0 and page.js("document.title") != "run"
    page.sees(HOSTILE.split(">")[0], ".message")
