"""The test files that take long: they start first, so that no worker ends with one, and `--quick` leaves them out."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LIST = Path(__file__).with_name("slow_files.txt")
SLOW_S = 6.0
"""Seconds from which on a file is in the list."""
TIMEOUT_FACTOR = 10
"""A test of a slow file may take this many times its file's seconds, where that is more than `timeout` in
pyproject.toml: beside other work, a test of two minutes takes ten."""


def read_slow_files(file: Path = LIST) -> dict[str, float]:
    """Seconds by file, relative to the repository's root; the longest first."""
    lines = (line.split() for line in file.read_text(encoding="utf-8").splitlines() if not line.startswith("#"))
    return {path: float(seconds) for seconds, path in lines}


def name_of(file: Path) -> str:
    """A file relative to the repository's root; nothing for one outside."""
    return file.relative_to(ROOT).as_posix() if file.is_relative_to(ROOT) else ""


def format_slow_files(seconds: dict[str, float]) -> str:
    """The text of the list."""
    slow = sorted(((round(value), path) for path, value in seconds.items() if value >= SLOW_S), reverse=True)
    head = (
        "# Test files by seconds on two quiet cores; written by `pytest --write-slow-files`, see tests/slow_files.py.\n"
    )
    return head + "".join(f"{value} {path}\n" for value, path in slow)


class SlowFiles:
    """Orders tests by their files' seconds, longest first. Leaves slow files out of quick runs."""

    def __init__(self, config: pytest.Config, slow: dict[str, float] | None = None) -> None:
        self._timeout_s = float(config.getini("timeout") or 0)
        self._slow = read_slow_files() if slow is None else slow
        self._is_quick = bool(config.getoption("--quick"))
        self._writes = bool(config.getoption("--write-slow-files")) and not hasattr(config, "workerinput")
        self._seconds: Counter[str] = Counter()

    def pytest_ignore_collect(self, collection_path: Path) -> bool | None:
        """Slow files are not even imported by a quick run."""
        return True if self._is_quick and name_of(collection_path) in self._slow else None

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            if (limit_s := self._slow.get(name_of(item.path), 0) * TIMEOUT_FACTOR) > self._timeout_s:
                item.add_marker(pytest.mark.timeout(limit_s), append=False)
        items.sort(key=lambda item: -self._slow.get(name_of(item.path), 0))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[report.nodeid.partition("::")[0]] += report.duration

    def pytest_sessionfinish(self) -> None:
        if self._writes:
            LIST.write_text(format_slow_files(self._seconds), encoding="utf-8")
