"""Fixtures that run a test once for each kind of gateway, on asyncio and on trio."""

from __future__ import annotations

import pytest

from tests.toolset_conformance.gateway_kinds import GATEWAY_KINDS, TOOL_GATEWAY_KINDS, OpenGateway


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=GATEWAY_KINDS)
def open_gateway(request: pytest.FixtureRequest) -> OpenGateway:
    return GATEWAY_KINDS[request.param]


@pytest.fixture(params=TOOL_GATEWAY_KINDS)
def open_tool_gateway(request: pytest.FixtureRequest) -> OpenGateway:
    """Also over MCP; for tests of tools only."""
    return TOOL_GATEWAY_KINDS[request.param]
