"""Reward functions come from files; each test writes its own."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.trainer.reward.attempts import Write


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    """Scoring needs no torch."""
    return str(request.param)


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Write]:
    """Writes my_rewards.py, and tells its folder; nobody finds it after the test."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    sys.modules.pop("my_rewards", None)

    def written(text: str) -> Path:
        (tmp_path / "my_rewards.py").write_text(text)
        return tmp_path

    yield written
    sys.modules.pop("my_rewards", None)
