"""The page of a run that goes on: it may be older than it, sees it grow, and tells its own server from the run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.browser.made_run import add, made
from tests.browser.page import Page
from tests.browser.runs_stage import GONE, shown
from trainer.run.file import Writer


def test_a_page_that_is_older_than_its_run_learns_how_it_is_made(page: Page, tmp_path: Path) -> None:
    page.allow(GONE)
    (tmp_path / "new").mkdir()
    with shown(tmp_path / "new") as url:
        page.open(url)
        page.sees("nothing measured yet", ".facts")
        made(tmp_path / "new", steps=3)
        page.sees("3 of 3", ".facts")
        page.sees("finished", ".facts")
        page.until("!!document.querySelector('.settings')")


@pytest.mark.parametrize(("view", "within"), [("", ".unanswered"), ("/live/rollouts", ".summary")])
def test_a_server_that_has_ended_is_not_taken_for_a_run_that_is_silent(
    page: Page, tmp_path: Path, view: str, within: str
) -> None:
    page.allow(GONE)
    with shown(made(tmp_path / "live", steps=3, over=False)) as url:
        page.open(f"{url}#{view}")
        page.sees("running" if within == ".unanswered" else "48 rollouts")
    page.sees("The page's server does not answer.", within)
    assert "running" not in page.text()


def test_a_live_run_grows_while_it_is_looked_at(page: Page, tmp_path: Path) -> None:
    page.allow(GONE)
    live = made(tmp_path / "live", steps=3, over=False)
    with shown(live) as url:
        page.open(url)
        page.sees("3 of 30", ".facts")
        page.sees("running", ".facts")
        with Writer(live) as writer, (live / "metrics.jsonl").open("ab") as told:
            add(writer, told, 4)
        page.sees("4 of 30", ".facts")
        page.open(f"{url}#/live/rollouts")
        page.sees("64 rollouts")
        with Writer(live) as writer, (live / "metrics.jsonl").open("ab") as told:
            add(writer, told, 5)
        page.sees("80 rollouts")
