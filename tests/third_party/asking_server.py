"""A FastMCP 4 server with tools that ask their caller, and that announce a new tool in two ways."""

from __future__ import annotations

import sys

from fastmcp import Context, FastMCP
from fastmcp.tools import Tool
from mcp_types import ToolListChangedNotification

server = FastMCP("asking")


def found() -> str:
    """Was added later."""
    return "here"


@server.tool
async def ask(context: Context) -> str:
    """Asks for a name."""
    answer = await context.elicit("What is your name?", response_type=str)
    return f"{answer.action} {getattr(answer, 'data', '')}"


@server.tool
async def add(context: Context) -> str:
    """Adds a tool, and announces it in the stream of this call."""
    server.add_tool(found)
    await context.send_notification(ToolListChangedNotification())
    return "added"


@server.tool
async def add_apart(context: Context) -> str:
    """Adds a tool, and announces it apart from this call, as background work does."""
    server.add_tool(Tool.from_function(found, name="found_apart"))
    await context.session.send_notification(ToolListChangedNotification())
    return "added"


if sys.argv[1] == "stdio":
    server.run(transport="stdio", show_banner=False)
else:
    server.run(transport="http", host="127.0.0.1", port=int(sys.argv[2]), show_banner=False)
