"""Every async test of the gateway runs on asyncio and on trio."""

from __future__ import annotations

import os

import pytest

# Tiny products are many times slower when threads share them; whoever tests threads sets their number.
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)
