"""A server of the TypeScript SDK speaks both MCP eras: it asks and announces in each, behind the gateway."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest

from gateway.gateway import Gateway
from gateway.types import Outcome
from tests.third_party.peers import write_servers
from tests.third_party.test_fastmcp4 import WITHIN_S, has_found, protocol_of, use_tool
from tests.waiting import wait_until

MODULES = Path(__file__).parents[2] / ".npm-peers/node_modules"
SERVER = Path(__file__).with_name("asking_server.mjs")


@asynccontextmanager
async def open_asking(folder: Path, **settings: str) -> AsyncIterator[Gateway]:
    node, sdk = shutil.which("node"), MODULES / "@modelcontextprotocol/server"
    assert node is not None and sdk.exists(), "run `make peers`, which needs Node.js and npm"
    entry = {"command": node, "args": [str(SERVER), str(sdk), str(MODULES / "zod")], "connect_timeout_s": WITHIN_S}
    with anyio.fail_after(2 * WITHIN_S):
        async with Gateway.load(None, write_servers(folder, asking=entry | settings)) as gateway:
            await wait_until(lambda: bool(gateway.specs), WITHIN_S)
            yield gateway


@pytest.mark.parametrize("protocol", ["auto", "2025-11-25"])
async def test_server_asks_and_announces_its_tools_in_each_era(tmp_path: Path, protocol: str) -> None:
    async with open_asking(tmp_path, protocol=protocol) as gateway:
        assert protocol_of(gateway) == ("2026-07-28" if protocol == "auto" else protocol)
        asked = await use_tool(gateway, "ask")
        assert (asked.outcome, asked.text) == (Outcome.OK, "accept Ada")
        assert not has_found(gateway)
        await use_tool(gateway, "add")
        await wait_until(lambda: has_found(gateway), WITHIN_S)


@pytest.mark.parametrize("isolation", ["shared", "process"])
async def test_refusal_to_ask_in_the_modern_era_leads_to_the_older_one(tmp_path: Path, isolation: str) -> None:
    async with open_asking(tmp_path, isolation=isolation) as gateway:
        refused = await use_tool(gateway, "ask_at_once")
        assert refused.outcome is Outcome.UNKNOWN and "asks nobody in MCP 2026-07-28" in (refused.reason or "")
        asked = await use_tool(gateway, "ask_at_once")
        assert (asked.outcome, asked.text) == (Outcome.OK, "accept Ada")
