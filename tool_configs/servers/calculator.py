"""An MCP server over stdio: sums and differences of whole numbers."""

from __future__ import annotations

import re

from mcp.server import MCPServer
from mcp.types import ToolAnnotations

_FORM = re.compile(r"\s*(\d{1,12})\s*([+-])\s*(\d{1,12})\s*")
server = MCPServer("calculator", instructions="Adds and subtracts.")


@server.tool(annotations=ToolAnnotations(read_only_hint=True, idempotent_hint=True), structured_output=False)
def calculate(expression: str) -> str:
    """Calculates a sum or a difference of two whole numbers, as `20 + 22`."""
    found = _FORM.fullmatch(expression)
    if found is None:
        raise ValueError("write two whole numbers with + or - between them")
    left, right = int(found[1]), int(found[3])
    return str(left + right if found[2] == "+" else left - right)


if __name__ == "__main__":
    server.run("stdio")
