"""Views of the web UI of runs for screenshots, with a finished and a running sample run."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gateway.http.settings import Settings
from tests.browser.page import NARROW, Page
from tests.browser.sample_run import STATUS, add_metrics_of_ranks, write_sample_run
from tests.browser.views import Stage, View
from trainer.storage.run_status import StatusFile
from trainer.web.app import serve_in_thread
from trainer.web.runs import name_runs

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
def _serve_ranks() -> Iterator[str]:
    with tempfile.TemporaryDirectory() as folder:
        run = write_sample_run(Path(folder) / "cities")
        add_metrics_of_ranks(run)
        with serve_runs(run) as url:
            yield url


def _run_of_ranks(page: Page, url: str) -> None:
    page.open(url)
    page.sees("rank 2 takes", ".alarms")
    page.until("[...document.querySelectorAll('.chart')].some(chart => chart.textContent.includes('Idle ranks'))")


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


def _tools(page: Page, url: str) -> None:
    page.open(f"{url}#/cities/tools")
    page.until("document.querySelectorAll('.data tbody tr').length > 10")


RUNS = Stage(
    _serve,
    (
        View("run", _run, in_docs=True),
        View("rollouts", _table, in_docs=True),
        View("rollout", _rollout, size=(1280, 1000), in_docs=True),
        View("rollout-image", _image),
        View("siblings", _siblings),
        View("compare", _compare),
        View("tools", _tools),
        View("rollout-narrow", _rollout, size=NARROW),
        View("run-narrow", _run, size=NARROW),
    ),
)
RANKS = Stage(_serve_ranks, (View("run-ranks", _run_of_ranks, size=(1280, 2600)),))
