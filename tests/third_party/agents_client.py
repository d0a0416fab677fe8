"""Lists and calls tools with openai-agents' stdio client, as an agent does; the arguments are the server's command."""

from __future__ import annotations

import asyncio
import json
import sys
import time

from agents.mcp import MCPServerStdio

INIT_TIMEOUT_S = 60.0
JOIN_TIMEOUT_S = 60.0


async def main() -> None:
    """Connects, lists, waits for a late server's tool, and calls it."""
    params = {"command": sys.argv[1], "args": sys.argv[2:]}
    async with MCPServerStdio(params, client_session_timeout_seconds=INIT_TIMEOUT_S) as server:  # type: ignore[arg-type]
        first = [tool.name for tool in await server.list_tools()]
        give_up_at = time.monotonic() + JOIN_TIMEOUT_S
        while "pid" not in (names := [tool.name for tool in await server.list_tools()]):
            assert time.monotonic() < give_up_at, names
            await asyncio.sleep(0.2)
        result = await server.call_tool("pid", {})
        sys.stdout.write(json.dumps({"first": first, "later": names, "pid": result.content[0].text}) + "\n")


asyncio.run(main())
