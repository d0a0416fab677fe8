"""A tape stands where a gateway does, for MCP clients too."""

from __future__ import annotations

from pathlib import Path

import anyio
import pytest

from gateway.gateway import Gateway
from gateway.tape import Replay, recorded
from tests.doors.kit import sources
from tests.front.kit import ERAS, WITHIN_S, connected


@pytest.mark.parametrize("era", ERAS)
async def test_what_clients_did_can_be_recorded_and_replayed(era: str, tmp_path: Path) -> None:
    async def play(gateway: Gateway) -> list[str]:
        async with gateway, connected(era, gateway) as client:
            results = [await client.call_tool("remember", {"word": word}) for word in ("a", "b")]
            results.append(await client.call_tool("several", {}))
            return [result.model_dump_json() for result in results]

    with anyio.fail_after(WITHIN_S):
        lived = await play(recorded(Gateway(sources()), tmp_path / "tape"))
        assert await play(Replay(tmp_path / "tape")) == lived
