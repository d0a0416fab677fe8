"""Third-party MCP servers in an environment of their own, which `make peers` installs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FASTMCP_PYTHON = str(Path(__file__).parents[2] / ".fastmcp-peers" / "bin" / "python")
"""Of FastMCP 4, which needs another release of `mcp`."""
ASKING_SERVER = str(Path(__file__).with_name("asking_server.py"))


def write_servers(folder: Path, **servers: dict[str, Any]) -> Path:
    """Writes a servers file."""
    file = folder / "mcp_servers.json"
    file.write_text(json.dumps({"mcpServers": servers}))
    return file
