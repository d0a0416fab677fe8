"""Large answers take memory in proportion to their bytes, whatever they hold and however they come."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.hostile.answering_server import ANSWERS

FACTOR = 6
"""Peak memory by bytes of the answers: the bytes, their text, the values, and what the allocator keeps."""
SLACK_BYTES = 20_000_000
TRICKS = ("batch", "objects", "escapes", "spaces", "huge_fraction")


def measure_growth(transport: str, trick: str, calls: int) -> int:
    """By how many bytes the peak of a gateway's memory grows with the answers, compared with small answers before."""
    command = [sys.executable, "-m", "tests.hostile.memory_probe", transport, trick, str(calls)]
    output = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout
    floor, peak = map(int, output.split())
    return peak - floor


@pytest.mark.parametrize(
    ("transport", "trick"), [("stdio", "batch"), ("events", "escapes"), *(("http", trick) for trick in TRICKS)]
)
def test_memory_of_a_large_answer_is_a_factor_of_its_bytes(transport: str, trick: str) -> None:
    assert measure_growth(transport, trick, 1) < FACTOR * len(ANSWERS[trick](1)) + SLACK_BYTES


def test_large_answers_at_once_take_no_more_than_that_each() -> None:
    assert measure_growth("events", "batch", 4) < 4 * FACTOR * len(ANSWERS["batch"](1)) + SLACK_BYTES
