"""Large answers take memory in proportion to their bytes, whatever they hold and however they come."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.hostile.answering_server import ANSWERS

FACTOR = 6
"""Peak memory by bytes of the answers: the bytes, their text, the values, and what the allocator keeps."""
SLACK_BYTES = 20_000_000
TRICKS = {
    "stdio": ("batch:1",),
    "events": ("escapes:1", "batch:4"),
    "http": ("huge_fraction:1", "spaces:1", "escapes:1", "batch:1", "objects:1"),
}
"""By transport; each takes more than the one before it, since a process tells only the highest peak so far."""


@pytest.mark.parametrize("transport", TRICKS)
def test_memory_of_large_answers_is_a_factor_of_their_bytes(transport: str) -> None:
    command = [sys.executable, "-m", "tests.hostile.memory_probe", transport, *TRICKS[transport]]
    output = subprocess.run(command, check=True, capture_output=True, text=True, timeout=240).stdout
    floor, *peaks = map(int, output.split())
    for trick, peak in zip(TRICKS[transport], peaks, strict=True):
        name, _, calls = trick.partition(":")
        assert peak - floor < int(calls) * FACTOR * len(ANSWERS[name](1)) + SLACK_BYTES, trick
