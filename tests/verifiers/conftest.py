"""Tests with the real `verifiers`, in virtual environments of their own: `make test-verifiers` runs them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.trainer.verifiers.verifiers_runs import SAMPLES, add_to_path

ROOT = Path(__file__).parents[2]
FOLDERS = {"v0": ".verifiers-v0", "v1": ".verifiers"}


def python_of(interface: str) -> str:
    """The Python with the release of verifiers that has this interface."""
    python = os.environ.get(f"MTRL_VERIFIERS_{interface.upper()}") or str(ROOT / FOLDERS[interface] / "bin/python")
    assert Path(python).exists(), f"{python} is missing: run `make verifiers`"
    return python


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(autouse=True)
def samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", add_to_path(SAMPLES))
