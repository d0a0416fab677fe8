"""Reward functions come from files; each test writes its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.trainer.reward.attempts import Write


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    """Scoring needs no torch."""
    return str(request.param)


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes my_rewards.py, and tells its folder."""

    def written(text: str) -> Path:
        (tmp_path / "my_rewards.py").write_text(text)
        return tmp_path

    return written
