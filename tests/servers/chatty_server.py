"""An MCP server that writes to standard error: its arguments at the start, and what its tools are called with."""

from __future__ import annotations

import sys

from mcp.server import MCPServer

server = MCPServer("chatty")


def write_line(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


@server.tool()
def say(text: str) -> str:
    """Says it."""
    write_line(text)
    return "said"


@server.tool()
def flood() -> str:
    """Writes much."""
    write_line("\n".join(f"line {number} of a flood" for number in range(3000)))
    return "flooded"


if __name__ == "__main__":
    write_line(" ".join(("<b>ready</b> \x1b[31mred\x1b[0m \u202eevil", *sys.argv[1:])))
    server.run()
