"""Fixtures of the training tests: the command line, in a folder of each test's own."""

from __future__ import annotations

import pytest

from tests.trainer.cli_data import RunCommand
from tests.trainer.train.trainings import Run


@pytest.fixture
def run(run: RunCommand) -> Run:
    """`mtrl-train` with these words; what it said."""
    return lambda *words, code=0: run(*words, code=code).output
