"""How failed tests are named, and how many may pass on their second run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest

from tests.conftest import FailureNames


class Lines:
    """A terminal reporter that keeps what it is told to write."""

    def __init__(self) -> None:
        self.written: list[str] = []

    def write_line(self, line: str) -> None:
        self.written.append(line)


def _run(outcomes: list[str]) -> tuple[str, int]:
    """What is printed for tests with these outcomes, and the exit status at the end."""
    lines = Lines()
    names = FailureNames(cast("pytest.TerminalReporter", lines))
    for index, outcome in enumerate(outcomes):
        report = SimpleNamespace(
            outcome=outcome,
            failed=outcome == "failed",
            nodeid=f"test_{index}",
            when="call",
            longreprtext="    assert x\nE   the reason\n",
        )
        names.pytest_runtest_logreport(cast("pytest.TestReport", report))
    session = SimpleNamespace(exitstatus=0)
    names.pytest_sessionfinish(cast("pytest.Session", session))
    return "\n".join(lines.written), session.exitstatus


def test_a_failed_test_is_named_with_its_reason_when_it_fails() -> None:
    assert _run(["passed", "failed"])[0].split() == ["FAILED", "now:", "test_1", "(call)", "E", "the", "reason"]


def test_a_test_that_runs_again_is_named_with_the_reason_of_its_first_failure() -> None:
    printed, status = _run(["rerun", "passed"])
    assert "test_0" in printed
    assert "the reason" in printed
    assert status == 0


def test_five_second_runs_pass_and_six_fail_the_whole_run() -> None:
    assert _run(["rerun"] * 5)[1] == 0
    printed, status = _run(["rerun"] * 6)
    assert status == pytest.ExitCode.TESTS_FAILED
    assert "6 tests had to run twice" in printed
