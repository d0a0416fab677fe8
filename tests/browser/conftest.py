"""Fixtures: one browser for all tests, and a new page for each, on which no error may occur."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.browser.chromium import Chromium, start_chromium
from tests.browser.page import Page


@pytest.fixture(scope="session")
def browser() -> Iterator[Chromium]:
    """Fails the tests if there is no browser, rather than skipping them."""
    with start_chromium() as started:
        yield started


@pytest.fixture
def page(browser: Chromium) -> Iterator[Page]:
    opened = Page(browser)
    try:
        yield opened
        assert opened.wrong == []
        assert len(opened.hosts) <= 1, "the page asked another host"
    finally:
        opened.close()
