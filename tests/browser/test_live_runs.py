"""Tests the web UI of runs that start, grow or lose their server while the page is open."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from tests.browser.page import Page
from tests.browser.runs_stage import CONNECTION_REFUSED, serve_runs
from tests.browser.sample_run import STATUS, add_step, write_sample_run
from trainer.storage.rollout_file import RolloutWriter
from trainer.storage.run_status import STATUS_FILE, RunStatus, write_status


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


def test_rollouts_of_a_running_run_appear_on_the_page(page: Page, tmp_path: Path) -> None:
    page.allow(CONNECTION_REFUSED)
    live = write_sample_run(tmp_path / "live", steps=3, finished=False)
    with serve_runs(live) as url:
        page.open(f"{url}#/live/rollouts")
        page.sees("48 rollouts")
        with RolloutWriter(live) as writer, (live / "metrics.jsonl").open("ab") as metrics:
            add_step(writer, metrics, 4)
        page.sees("64 rollouts")


def test_step_that_is_being_made_moves_on_the_page(page: Page, tmp_path: Path) -> None:
    page.allow(CONNECTION_REFUSED)
    live = write_sample_run(tmp_path / "live", steps=3, finished=False)
    write_status(live, STATUS)
    with serve_runs(live) as url:
        page.open(url)
        page.sees("Step 15 of 140: rolling out for 72 s", ".live")
        page.sees("1,530 tokens/s · 84,210 tokens in 37 turns · slowest tool draw_bars, p95 360 ms", ".live")
        page.sees("about 41 s left of the step · 3 h 50 min of the run", ".live")
        states = "5 of 16 ended 6 generating 3 calling tools 2 waiting"
        assert page.text(".live .states").split() == states.split()
        assert page.text(".live [role=status]") == "Step 15 of 140: rolling out for 72 s, 25 % of the rollouts"
        before = len(page.requests)
        write_status(live, replace(STATUS, ended=11, generating=0))
        page.until("document.querySelector('.live [role=progressbar]').ariaValueNow === '11'")
        page.sees("50 % of the rollouts", ".live [role=status]")
        asked = [request.partition("/v1/")[2] for request in page.requests[before:]]
        assert asked and all(request.startswith("runs/live/metrics?from=") for request in asked), "one request a look"
        write_status(live, replace(STATUS, phase="learning", passes=2, total_passes=8))
        page.until("document.querySelector('.live [role=progressbar]').ariaValueText === '2 of 8 micro-batches'")
        os.utime(live / STATUS_FILE, (1e9, 1e9))
        page.sees("No sign of life", ".live .notice")
        page.sees("no change since", ".facts")
        (live / STATUS_FILE).unlink()
        page.until("document.querySelector('.live').hidden")


def test_evaluation_of_a_finished_run_and_rollouts_without_training_move_on_the_page(
    page: Page, tmp_path: Path
) -> None:
    page.allow(CONNECTION_REFUSED)
    done = write_sample_run(tmp_path / "done", steps=3)
    write_status(done, RunStatus(phase="evaluating greedy before", phase_s=5, ended=3, total=12, written=900))
    with serve_runs(done) as url:
        page.open(url)
        page.sees("Evaluating greedy before for 5 s", ".live")
        assert page.text(".live .states").split() == ["3", "of", "12", "ended"]
        page.sees("finished", ".facts")
        write_status(done, RunStatus(phase="collecting rollouts", phase_s=7, ended=1, total=12))
        page.sees("Collecting rollouts for 7 s", ".live")
        os.utime(done / STATUS_FILE, (1e9, 1e9))
        page.until("document.querySelector('.live').hidden")  # An evaluation that was killed.


def test_focus_stays_when_the_page_refreshes_itself(page: Page, tmp_path: Path) -> None:
    page.allow(CONNECTION_REFUSED)
    live = write_sample_run(tmp_path / "live", steps=3, finished=False)
    with serve_runs(live) as url:
        page.open(url)
        page.sees("3 of 30", ".facts")
        page.sees("running", ".facts")
        page.js("document.querySelector('.values').open = true")
        page.until("document.querySelectorAll('.values tbody tr').length === 3")
        for step, selector in enumerate((".runname", ".values tbody th a", ".plot"), 4):
            page.js(f"document.querySelector({selector!r}).focus()")
            with RolloutWriter(live) as writer, (live / "metrics.jsonl").open("ab") as metrics:
                add_step(writer, metrics, step)
            page.sees(f"{step} of 30", ".facts")
            page.until(f"document.querySelectorAll('.values tbody tr').length === {step}")
            assert page.js(f"document.activeElement.matches({selector!r})"), selector
