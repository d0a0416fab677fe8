"""Fixtures for environments of other frameworks: host processes can import the samples and the stand-ins."""

from __future__ import annotations

import pytest

from tests.plugins.environments.environment_runs import SAMPLES, STAND_IN
from tests.plugins.verifiers.verifiers_runs import add_to_path


@pytest.fixture(autouse=True)
def samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", add_to_path(SAMPLES, STAND_IN))
