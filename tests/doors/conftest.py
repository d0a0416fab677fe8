"""A test that takes `door` runs once for each way to a gateway."""

from __future__ import annotations

import pytest

from tests.doors.ways import DOORS, TOOL_DOORS, Door


@pytest.fixture(params=DOORS)
def door(request: pytest.FixtureRequest) -> Door:
    return DOORS[request.param]


@pytest.fixture(params=TOOL_DOORS)
def tool_door(request: pytest.FixtureRequest) -> Door:
    """For what is said of tools alone."""
    return TOOL_DOORS[request.param]
