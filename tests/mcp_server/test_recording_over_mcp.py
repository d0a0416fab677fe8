"""Recording and replaying a gateway whose clients use MCP."""

from __future__ import annotations

from pathlib import Path

import anyio
import pytest

from gateway.gateway import Gateway
from gateway.tape import ReplayGateway, record_gateway
from tests.mcp_server.clients import CLIENT_MODES, TIMEOUT_S, connect_client
from tests.toolset_conformance.sample_tools import sample_sources


@pytest.mark.parametrize("protocol", CLIENT_MODES)
async def test_calls_over_mcp_can_be_recorded_and_replayed(protocol: str, tmp_path: Path) -> None:
    async def call_tools(gateway: Gateway) -> list[str]:
        async with gateway, connect_client(protocol, gateway) as client:
            results = [await client.call_tool("remember", {"word": word}) for word in ("a", "b")]
            results.append(await client.call_tool("several", {}))
            return [result.model_dump_json() for result in results]

    with anyio.fail_after(TIMEOUT_S):
        recorded = await call_tools(record_gateway(Gateway(sample_sources()), tmp_path / "tape"))
        assert await call_tools(ReplayGateway(tmp_path / "tape")) == recorded
