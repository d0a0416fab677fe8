"""Losses are compared with slow loops to the last digits, so that everything here is small and in double precision."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _one_thread(one_thread: None) -> Iterator[None]:
    yield
