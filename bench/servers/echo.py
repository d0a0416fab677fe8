"""The tool server behind every row: it says again what it is told, so that what is measured is the way to it.

    python bench/servers/echo.py [--port 0]

With a port it serves streamable HTTP and says where, without one it speaks stdio. `hold` answers nobody before
as many calls have come as each of them names; `seen` tells how often each token came.
"""

from __future__ import annotations

import argparse
import json
import socket
from collections import Counter
from typing import Any

import anyio
import mcp_types as types
import uvicorn
from mcp.server import Server, ServerRequestContext
from mcp.server.stdio import stdio_server

Context = ServerRequestContext[Any, Any]
TOKEN: dict[str, Any] = {"type": "object", "properties": {"token": {"type": "string"}}, "required": ["token"]}
HELD: dict[str, Any] = {
    "type": "object",
    "properties": {"token": {"type": "string"}, "among": {"type": "integer"}},
    "required": ["token", "among"],
}
TOOLS = [
    types.Tool(name="echo", description="Says the token again.", input_schema=TOKEN),
    types.Tool(name="hold", description="Says the token again once `among` calls are here.", input_schema=HELD),
    types.Tool(name="seen", description="How often each token came to `hold`.", input_schema={"type": "object"}),
]


class Echo:
    def __init__(self) -> None:
        self.seen: Counter[str] = Counter()
        self.all_here = anyio.Event()

    async def call(self, _: Context, params: types.CallToolRequestParams) -> types.CallToolResult:
        given = params.arguments or {}
        if params.name == "seen":
            return _text(json.dumps(self.seen))
        if params.name == "hold":
            await self._hold(given["token"], given["among"])
        return _text(given["token"])

    async def _hold(self, token: str, among: int) -> None:
        self.seen[token] += 1
        if self.seen.total() >= among:
            self.all_here.set()
        await self.all_here.wait()


def _text(text: str) -> types.CallToolResult:
    return types.CallToolResult(content=[types.TextContent(type="text", text=text)])


async def _list(_: Context, params: types.PaginatedRequestParams | None) -> types.ListToolsResult:
    return types.ListToolsResult(tools=TOOLS)


def server() -> Server[Any]:
    return Server("echo", version="1", on_list_tools=_list, on_call_tool=Echo().call)


async def _stdio() -> None:
    served = server()
    async with stdio_server() as (read, write):
        await served.run(read, write, served.create_initialization_options())


def _http(port: int) -> None:
    listening = socket.socket(proto=socket.IPPROTO_TCP)  # so that asyncio, too, sends at once
    listening.bind(("127.0.0.1", port))
    listening.listen(2048)
    print(f"http://127.0.0.1:{listening.getsockname()[1]}/mcp", flush=True)
    app = server().streamable_http_app(json_response=True)
    uvicorn.Server(uvicorn.Config(app, log_level="error", timeout_keep_alive=75)).run([listening])


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--port", type=int)
    port = options.parse_args().port
    if port is None:
        anyio.run(_stdio)
    else:
        _http(port)


if __name__ == "__main__":
    main()
