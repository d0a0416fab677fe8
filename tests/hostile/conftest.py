"""Garbage is collected after these tests as before them."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def garbage_thresholds() -> Iterator[None]:
    """`collect_garbage_seldom` changes those of the process."""
    thresholds = gc.get_threshold()
    yield
    gc.set_threshold(*thresholds)
