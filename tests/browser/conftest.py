"""One browser for all; a page of its own for each test, of which nothing may have gone wrong."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.browser.chromium import Chromium, chromium
from tests.browser.page import Page


@pytest.fixture(scope="session")
def browser() -> Iterator[Chromium]:
    """Missing, it fails the tests: a page that nobody opened is not known to work."""
    with chromium() as started:
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
