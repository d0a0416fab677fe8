"""Fixtures that run a test once for each kind of gateway on asyncio, and for two of them on trio, too."""

from __future__ import annotations

import pytest

from tests.toolset_conformance.gateway_kinds import GATEWAY_KINDS, TOOL_GATEWAY_KINDS, OpenGateway

ON_TRIO = ("in_process", "http")
"""The kinds of gateways that are tried on trio, too: the others are made of these."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items[:] = [item for item in items if not _is_left_out(item)]


def _is_left_out(item: pytest.Item) -> bool:
    values = getattr(getattr(item, "callspec", None), "params", {})
    kind = values.get("open_gateway") or values.get("open_tool_gateway")
    return kind is not None and values.get("anyio_backend") == "trio" and kind not in ON_TRIO


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
