"""Which tests coverage is measured of: those on one event loop.

Measuring doubles the processor time of a test, and what trio runs is what asyncio runs.
"""

from __future__ import annotations

from collections.abc import Generator

import pytest
from coverage import Coverage


class MeasuredTests:
    """Pauses coverage during the other tests."""

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        measuring = Coverage.current()
        if measuring is None or is_measured(item):
            return (yield)
        measuring.stop()
        try:
            return (yield)
        finally:
            measuring.start()


def is_measured(item: pytest.Item) -> bool:
    """Whether coverage is measured while this test runs."""
    parameters = getattr(item, "callspec", None)
    return parameters is None or parameters.params.get("anyio_backend") != "trio"
