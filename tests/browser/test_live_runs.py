"""Tests the web UI of runs that start, grow or lose their server while the page is open."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.browser.page import Page
from tests.browser.runs_stage import CONNECTION_REFUSED, serve_runs
from tests.browser.sample_run import add_step, write_sample_run
from trainer.storage.rollout_file import RolloutWriter


def test_page_shows_run_that_starts_later(page: Page, tmp_path: Path) -> None:
    page.allow(CONNECTION_REFUSED)
    (tmp_path / "new").mkdir()
    with serve_runs(tmp_path / "new") as url:
        page.open(url)
        page.sees("no metrics yet", ".facts")
        write_sample_run(tmp_path / "new", steps=3)
        page.sees("3 of 3", ".facts")
        page.sees("finished", ".facts")
        page.until("!!document.querySelector('.settings')")


@pytest.mark.parametrize(("view", "selector"), [("", ".server-error"), ("/live/rollouts", ".summary")])
def test_stopped_server_is_not_shown_as_a_stalled_run(page: Page, tmp_path: Path, view: str, selector: str) -> None:
    page.allow(CONNECTION_REFUSED)
    with serve_runs(write_sample_run(tmp_path / "live", steps=3, finished=False)) as url:
        page.open(f"{url}#{view}")
        page.sees("running" if selector == ".server-error" else "48 rollouts")
    page.sees("The page's server does not answer.", selector)
    assert "running" not in page.text()


def test_running_run_grows_on_the_page(page: Page, tmp_path: Path) -> None:
    page.allow(CONNECTION_REFUSED)
    live = write_sample_run(tmp_path / "live", steps=3, finished=False)
    with serve_runs(live) as url:
        page.open(url)
        page.sees("3 of 30", ".facts")
        page.sees("running", ".facts")
        with RolloutWriter(live) as writer, (live / "metrics.jsonl").open("ab") as metrics:
            add_step(writer, metrics, 4)
        page.sees("4 of 30", ".facts")
        page.open(f"{url}#/live/rollouts")
        page.sees("64 rollouts")
        with RolloutWriter(live) as writer, (live / "metrics.jsonl").open("ab") as metrics:
            add_step(writer, metrics, 5)
        page.sees("80 rollouts")
