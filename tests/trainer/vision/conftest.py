"""Fixtures of the vision tests: each kind of vision model is made once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.trainer.vision.vision_models import KINDS, seeing_model


@pytest.fixture(autouse=True)
def _one_thread(one_thread: None) -> Iterator[None]:
    yield


@pytest.fixture(scope="session", params=KINDS)
def kind(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny model of each family."""
    return seeing_model(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="session")
def sees(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of one of them."""
    return seeing_model(tmp_path_factory.mktemp("sees"))
