"""An MCP server over stdio: a notebook, whose notes last for one session."""

from __future__ import annotations

from mcp.server import MCPServer

server = MCPServer("notebook", instructions="Write down what you will need later; read it back when you do.")
pages: list[str] = []


@server.tool()
def write_note(text: str) -> str:
    """Writes a note and returns its number."""
    pages.append(text)
    return f"Note {len(pages)} is written."


@server.tool()
def read_notes(containing: str = "") -> list[str]:
    """Reads the notes back, all of them or those that contain a word."""
    return [f"{number}: {text}" for number, text in enumerate(pages, 1) if containing.lower() in text.lower()]


if __name__ == "__main__":
    server.run("stdio")
