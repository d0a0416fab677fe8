"""An MCP server over streamable HTTP whose tool returns its token: what is measured is the path to it.

It prints its URL. `plain_stdio.py` has the same tool over stdio.
"""

from __future__ import annotations

import socket
from typing import Any

import mcp_types as types
import uvicorn
from mcp.server import Server, ServerRequestContext

Context = ServerRequestContext[Any, Any]
ARGUMENTS: dict[str, Any] = {"type": "object", "properties": {"token": {"type": "string"}}, "required": ["token"]}
TOOLS = [types.Tool(name="echo", description="Returns the token.", input_schema=ARGUMENTS)]


async def _list_tools(_: Context, params: types.PaginatedRequestParams | None) -> types.ListToolsResult:
    return types.ListToolsResult(tools=TOOLS)


async def _call_tool(_: Context, params: types.CallToolRequestParams) -> types.CallToolResult:
    token = (params.arguments or {})["token"]
    return types.CallToolResult(content=[types.TextContent(type="text", text=token)])


def main() -> None:
    listener = socket.socket(proto=socket.IPPROTO_TCP)  # disables Nagle's algorithm under asyncio too
    listener.bind(("127.0.0.1", 0))
    listener.listen(2048)
    print(f"http://127.0.0.1:{listener.getsockname()[1]}/mcp", flush=True)
    server = Server[Any]("echo", version="1", on_list_tools=_list_tools, on_call_tool=_call_tool)
    config = uvicorn.Config(
        server.streamable_http_app(json_response=True),
        loop="uvloop",
        http="httptools",
        log_level="error",
        access_log=False,
        server_header=False,
        timeout_keep_alive=75,
    )
    uvicorn.Server(config).run([listener])


if __name__ == "__main__":
    main()
