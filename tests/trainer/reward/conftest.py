"""Fixtures for reward tests, which write their own reward functions."""

from __future__ import annotations

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
