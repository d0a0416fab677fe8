"""Fixtures for reward tests, which write their own reward functions."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.trainer.reward.attempts import Write


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """A function that writes my_rewards.py, and returns its folder."""

    def write_file(text: str) -> Path:
        (tmp_path / "my_rewards.py").write_text(text)
        return tmp_path

    return write_file


@pytest.fixture
def released() -> Iterator[threading.Event]:
    """What hanging functions wait for, so that no thread outlives its test."""
    event = threading.Event()
    yield event
    event.set()
