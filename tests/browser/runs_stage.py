"""The page of runs over two that were made up: one that is over, and one that still goes on."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gateway.http.settings import Settings
from tests.browser.made_run import made
from tests.browser.page import NARROW, Page
from tests.browser.views import Stage, View
from trainer.page.runs import named
from trainer.page.serve import beside

GONE = "ERR_CONNECTION_REFUSED"
"""A page that is still open asks a server that has ended."""


@contextmanager
def shown(*folders: Path) -> Iterator[str]:
    """Gives the address, and waits until every rollout is listed."""
    runs = named(folders)
    for run in runs:
        while run.grow():
            pass
    with beside(runs, Settings(port=0)) as url:
        yield url


@contextmanager
def _serve() -> Iterator[str]:
    with tempfile.TemporaryDirectory() as folder:
        first = made(Path(folder) / "cities")
        second = made(Path(folder) / "cities-lr-3e-6", seed=1, steps=14, over=False)
        with shown(first, second) as url:
            yield url


def _run(page: Page, url: str) -> None:
    page.open(url)
    page.until("document.querySelectorAll('.chart path').length > 12")
    page.hover(".plot")


def _table(page: Page, url: str) -> None:
    page.open(f"{url}#/cities/rollouts?step=10-14")
    page.until("document.querySelectorAll('.rows a.line').length > 10")
    page.press("j")


def _rollout(page: Page, url: str) -> None:
    page.open(f"{url}#/cities/rollouts/169?by=advantage&token=66")
    page.until("document.querySelector('.inspector .because')")
    page.js("document.querySelector('.fold.reasoning').open = true")
    page.js("scrollTo(0, 0)")


def _picture(page: Page, url: str) -> None:
    page.open(f"{url}#/cities/rollouts/171")
    page.until("document.querySelector('.medium img')?.complete")
    page.js("document.querySelector('.medium').scrollIntoView({block: 'center'})")


def _siblings(page: Page, url: str) -> None:
    page.open(f"{url}#/cities/group/11-0-2")
    page.until("document.querySelectorAll('.attempt').length > 1")


RUNS = Stage(
    _serve,
    (
        View("run", _run, kept=True),
        View("rollouts", _table, kept=True),
        View("rollout", _rollout, size=(1280, 1000), kept=True),
        View("rollout-picture", _picture),
        View("siblings", _siblings),
        View("rollout-narrow", _rollout, size=NARROW),
        View("run-narrow", _run, size=NARROW),
    ),
)
