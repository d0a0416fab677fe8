"""Fixtures for environments of `verifiers`: host processes can import the stand-in and the sample environments."""

from __future__ import annotations

import pytest

from tests.plugins.verifiers.verifiers_runs import SAMPLES, STAND_IN, add_to_path


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", add_to_path(STAND_IN, SAMPLES))
