"""A test that takes `door` runs once for each way to a gateway."""

from __future__ import annotations

import pytest

from tests.doors.ways import DOORS, Door


@pytest.fixture(params=DOORS)
def door(request: pytest.FixtureRequest) -> Door:
    return DOORS[request.param]
