"""The user of a protected MCP server: a servers file, logins, and calls through a toolset."""

from __future__ import annotations

import json
import stat
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio

from gateway.config.load import load_config
from gateway.login import find_server, login_server, logout_server
from gateway.mcp_client.auth.token_file import state_folder
from gateway.mcp_client.mcp_toolset import McpToolset
from gateway.mcp_client.transport import Services
from gateway.types import Outcome
from tests.mcp_client.auth.authorization_server import ProtectedServer, follow_redirects, serve_protected
from tests.mcp_client.mcp_toolsets import call_tool


class User:
    """The user of one protected server: its file, logins and calls."""

    def __init__(self, server: ProtectedServer, folder: Path, **settings: object) -> None:
        self.server, self.authorization = server, server.authorization
        self.file = folder / "mcp_servers.json"
        self.configure(**settings)
        self.lines: list[str] = []

    def configure(self, **settings: Any) -> None:
        oauth = settings.get("oauth") or {}
        if {"client_secret", "private_key_file"} & set(oauth):
            settings["oauth"] = {"issuer": self.authorization.url, **oauth}
        self.file.write_text(json.dumps({"mcpServers": {"vault": {"url": self.server.url, **settings}}}))

    async def log_in(self) -> None:
        entry = find_server("vault", self.file)
        await login_server(entry, self.lines.append, open_browser=follow_redirects, timeout_s=20)

    async def log_out(self) -> None:
        await logout_server(find_server("vault", self.file), self.lines.append)

    @asynccontextmanager
    async def toolset(self) -> AsyncIterator[McpToolset]:
        config = load_config(None, self.file).servers["vault"].server
        async with Services() as services, McpToolset("vault", config, services=services) as toolset:
            yield toolset

    async def call(self, tool: str = "read") -> tuple[Outcome, str]:
        async with self.toolset() as toolset:
            if toolset.status.state != "up":
                return Outcome.UNAVAILABLE, f"{toolset.status.reason}: {toolset.status.remedy}"
            result = await call_tool(toolset, tool)
        return result.outcome, result.reason or ""

    def stored(self) -> dict[str, object]:
        (file,) = login_files()
        stored: dict[str, object] = json.loads(file.read_text())
        return stored


def login_files() -> list[Path]:
    """The files of all logins."""
    return list(state_folder().glob("*.json"))


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@asynccontextmanager
async def user_of_protected_server(folder: Path, **settings: object) -> AsyncIterator[User]:
    with anyio.fail_after(120):
        async with serve_protected() as server:
            yield User(server, folder, **settings)
