"""Which tests coverage is measured of: of quick files, and on one event loop.

Measuring doubles the processor time of a test. What trio runs is what asyncio runs, and slow files mostly run for
longer what quick ones run.
"""

from __future__ import annotations

from collections.abc import Generator

import pytest
from coverage import Coverage

from tests.slow_files import name_of, read_slow_files


class MeasuredTests:
    """Pauses coverage during the other tests."""

    def __init__(self, slow: dict[str, float] | None = None) -> None:
        self._slow = read_slow_files() if slow is None else slow

    def is_measured(self, item: pytest.Item) -> bool:
        """Whether coverage is measured while this test runs."""
        parameters = getattr(item, "callspec", None)
        on_trio = parameters is not None and parameters.params.get("anyio_backend") == "trio"
        return not on_trio and name_of(item.path) not in self._slow

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        measuring = Coverage.current()
        if measuring is None or self.is_measured(item):
            return (yield)
        measuring.stop()
        try:
            return (yield)
        finally:
            measuring.start()
