"""Views of the web UI of runs for screenshots, with a finished and a running sample run."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from gateway.http.settings import Settings
from mtrl_plugins.web.app import serve_in_thread
from mtrl_plugins.web.runs import name_runs
from tests.browser.page import Page
from tests.browser.sample_run import STATUS, write_sample_run
from tests.browser.views import Stage, View
from trainer.ledger import Author, Entry, Ledger
from trainer.rollout.rollout import Rollout, StopReason
from trainer.storage.rollout_file import RolloutWriter
from trainer.storage.run_status import StatusFile, write_status

CONNECTION_REFUSED = "ERR_CONNECTION_REFUSED"
"""The error of a page whose server has stopped."""


@contextmanager
def serve_runs(*folders: Path) -> Iterator[str]:
    """Serves the runs after all rollouts are indexed; yields the URL."""
    runs = name_runs(folders)
    for run in runs:
        while run.update_index():
            pass
    with serve_in_thread(runs, Settings(port=0)) as url:
        yield url


@contextmanager
def _serve() -> Iterator[str]:
    with tempfile.TemporaryDirectory() as folder:
        first = write_sample_run(Path(folder) / "cities")
        second = write_sample_run(Path(folder) / "cities-lr-3e-6", seed=1, steps=14, finished=False)
        with StatusFile(second, lambda: STATUS), serve_runs(first, second) as url:
            yield url


@contextmanager
def _serve_starting() -> Iterator[str]:
    """A run whose first step is being made."""
    first = replace(STATUS, step=1, phase="evaluating", left_s=None, run_left_s=None, ended=0, turns=0, written=0)
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "new"
        run.mkdir()
        with StatusFile(run, lambda: replace(first, written_per_s=0.0, slowest_tool="")), serve_runs(run) as url:
            yield url


@contextmanager
def _serve_odd() -> Iterator[str]:
    """A run that was killed in its fourth step, and one with a single rollout that calls no tool."""
    with tempfile.TemporaryDirectory() as folder:
        killed, single = write_sample_run(Path(folder) / "killed", steps=3, finished=False), Path(folder) / "single"
        write_status(killed, replace(STATUS, step=4))
        hour_ago = time.time() - 3600
        for file in killed.iterdir():
            os.utime(file, (hour_ago, hour_ago))
        single.mkdir()
        prompt = Entry(Author.TASK, (1, 2), ({"role": "user", "content": "How many people live in Oslo?"},))
        with RolloutWriter(single) as writer:
            writer.add(Rollout("city-Oslo", Ledger((prompt,)), StopReason.ENGINE_FAILED, "1-0-0", reason="it is gone"))
        with serve_runs(killed, single) as url:
            yield url


def _run(page: Page, url: str) -> None:
    page.open(url)
    page.until("document.querySelectorAll('.chart path').length > 12")
    page.sees("no group has a learning signal", ".alarm")  # It moves the charts.
    page.hover(".plot")


def _table(page: Page, url: str) -> None:
    page.open(f"{url}#/cities/rollouts?step=10-14")
    page.until("document.querySelectorAll('.rows .line.filled').length > 10")
    page.press("j")


def _rollout(page: Page, url: str) -> None:
    page.open(f"{url}#/cities/rollouts/169?by=advantage&token=66")
    page.until("document.querySelector('.inspector .because')")
    page.js("document.querySelector('.fold.reasoning').open = true")
    page.js("scrollTo(0, 0)")


def _image(page: Page, url: str) -> None:
    page.open(f"{url}#/cities/rollouts/171")
    page.until("document.querySelector('.media img')?.complete")
    page.js("document.querySelector('.media').scrollIntoView({block: 'center'})")


def _siblings(page: Page, url: str) -> None:
    page.open(f"{url}#/cities/group/11-0-2")
    page.until("document.querySelectorAll('.attempt').length > 1")


def _compare(page: Page, url: str) -> None:
    page.open(f"{url}#/cities/compare/6-7")
    page.until("document.querySelector('.causes li')")


def _values(page: Page, url: str) -> None:
    page.open(url)
    page.until("document.querySelectorAll('.chart path').length > 12")
    page.js("document.querySelector('.values').open = true")
    page.until("document.querySelectorAll('.values tbody tr').length > 10")
    page.js("document.querySelector('.values').scrollIntoView()")


def _seen(address: str, text: str) -> Callable[[Page, str], None]:
    """Opens an address, and waits for a text."""

    def show(page: Page, url: str) -> None:
        page.open(url + address)
        page.sees(text)

    return show


RUNS = Stage(
    _serve,
    (
        View("run", _run, in_docs=True),
        View("rollouts", _table, in_docs=True),
        View("rollout", _rollout, size=(1280, 1000), in_docs=True),
        View("rollout-image", _image),
        View("siblings", _siblings),
        View("compare", _compare),
        View("values", _values),
    ),
)
STARTING_RUN = Stage(
    _serve_starting,
    (
        View("starting-run", _seen("#/", "No metrics yet")),
        View("starting-rollouts", _seen("#/new/rollouts", "No rollout has ended yet")),
    ),
)
ODD_RUNS = Stage(
    _serve_odd,
    (
        View("killed-run", _seen("#/", "No sign of life")),
        View("single-rollout", _seen("#/single/rollouts/0", "it is gone")),
        View("single-sibling", _seen("#/single/group/1-0-0", "No token of this group was pushed")),
        View("single-compare", _seen("#/single/compare/0-1", "No rollout of step 0")),
        View("unknown-run", _seen("#/elsewhere", "There is no run elsewhere here")),
    ),
)
