"""An MCP server whose tool returns its token: what is measured is the path to it.

    python bench/servers/echo.py [--port 0]

With a port it serves streamable HTTP and prints its URL, without one stdio. `hold` answers only when as many calls have
arrived as each of them says; `seen` returns how often each token arrived.
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
TOKEN_ARGUMENTS: dict[str, Any] = {"type": "object", "properties": {"token": {"type": "string"}}, "required": ["token"]}
HOLD_ARGUMENTS: dict[str, Any] = {
    "type": "object",
    "properties": {"token": {"type": "string"}, "among": {"type": "integer"}},
    "required": ["token", "among"],
}
TOOLS = [
    types.Tool(name="echo", description="Returns the token.", input_schema=TOKEN_ARGUMENTS),
    types.Tool(
        name="hold", description="Returns the token once `among` calls have arrived.", input_schema=HOLD_ARGUMENTS
    ),
    types.Tool(name="seen", description="How often each token arrived at `hold`.", input_schema={"type": "object"}),
]


class EchoTools:
    """The tools, and the tokens that `hold` received."""

    def __init__(self) -> None:
        self.seen: Counter[str] = Counter()
        self.all_arrived = anyio.Event()

    async def call(self, _: Context, params: types.CallToolRequestParams) -> types.CallToolResult:
        arguments = params.arguments or {}
        if params.name == "seen":
            return _text(json.dumps(self.seen))
        if params.name == "hold":
            await self._hold(arguments["token"], arguments["among"])
        return _text(arguments["token"])

    async def _hold(self, token: str, among: int) -> None:
        self.seen[token] += 1
        if self.seen.total() >= among:
            self.all_arrived.set()
        await self.all_arrived.wait()


def _text(text: str) -> types.CallToolResult:
    return types.CallToolResult(content=[types.TextContent(type="text", text=text)])


async def _list_tools(_: Context, params: types.PaginatedRequestParams | None) -> types.ListToolsResult:
    return types.ListToolsResult(tools=TOOLS)


def make_server() -> Server[Any]:
    return Server("echo", version="1", on_list_tools=_list_tools, on_call_tool=EchoTools().call)


async def _serve_stdio() -> None:
    server = make_server()
    async with stdio_server() as (read, write):
        await server.run(read, write, server.create_initialization_options())


def _serve_http(port: int) -> None:
    listener = socket.socket(proto=socket.IPPROTO_TCP)  # disables Nagle's algorithm under asyncio too
    listener.bind(("127.0.0.1", port))
    listener.listen(2048)
    print(f"http://127.0.0.1:{listener.getsockname()[1]}/mcp", flush=True)
    app = make_server().streamable_http_app(json_response=True)
    config = uvicorn.Config(
        app,
        loop="uvloop",
        http="httptools",
        log_level="error",
        access_log=False,
        server_header=False,
        timeout_keep_alive=75,
    )
    uvicorn.Server(config).run([listener])


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--port", type=int)
    port = options.parse_args().port
    if port is None:
        anyio.run(_serve_stdio)
    else:
        _serve_http(port)


if __name__ == "__main__":
    main()
