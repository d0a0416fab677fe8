"""Agents that nobody here wrote: `make test-agents` installs them and runs these tests."""

from __future__ import annotations

import pytest


@pytest.fixture(params=["asyncio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)
