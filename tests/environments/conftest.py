"""Tests with the real frameworks, in interpreters of their own: `make test-environments` runs them."""

from __future__ import annotations

import pytest

from tests.environments.real_environments import SAMPLES as REAL_SAMPLES
from tests.plugins.environments.environment_runs import SAMPLES
from tests.plugins.verifiers.verifiers_runs import SAMPLES as VERIFIERS_SAMPLES
from tests.plugins.verifiers.verifiers_runs import add_to_path


@pytest.fixture(autouse=True)
def samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", add_to_path(VERIFIERS_SAMPLES, SAMPLES, REAL_SAMPLES))
