"""An MCP server over stdio with one tool. Any MCP server, in any language, can stand in mcp_servers.json instead."""

from __future__ import annotations

import operator
import re

from mcp.server import MCPServer
from mcp.types import ToolAnnotations

OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul}
SUM = re.compile(r"\s*(-?\d{1,12})\s*([-+*])\s*(-?\d{1,12})\s*")
server = MCPServer("calculator")


@server.tool(annotations=ToolAnnotations(read_only_hint=True, idempotent_hint=True), structured_output=False)
def calculate(expression: str) -> str:
    """Calculates two whole numbers with +, - or *, such as `12 + 30`."""
    match = SUM.fullmatch(expression)
    if match is None:
        return f"{expression[:50]!r} is not two whole numbers with +, - or * between them"
    return str(OPERATIONS[match[2]](int(match[1]), int(match[3])))


if __name__ == "__main__":
    server.run("stdio")
