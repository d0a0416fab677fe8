"""`mtrl-gateway login` and `logout`: a person's OAuth login at one MCP server, in a browser."""

from __future__ import annotations

import webbrowser
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import anyio
from anyio import to_thread

from gateway.build import build_plan
from gateway.config.configured_server import ConfiguredServer
from gateway.errors import GatewayError
from gateway.mcp_client.auth.browser_login import log_in, log_out
from gateway.mcp_client.auth.credentials import AuthError, Challenge
from gateway.mcp_client.auth.oauth_credentials import NoCredentials, PersonCredentials, build_credentials
from gateway.mcp_client.mcp_toolset import McpToolset
from gateway.mcp_client.server_status import ServerStatus
from gateway.mcp_client.transport import Services

BROWSER_S = 10.0
"""How long opening a browser may take; the address is printed anyway."""
Write = Callable[[str], None]
OpenBrowser = Callable[[str], bool]


def find_server(name: str, servers: Path | None) -> ConfiguredServer:
    """The server of that name; raises `GatewayError` with the known names."""
    known = build_plan(None, servers).config.servers if servers is not None else {}
    if name not in known:
        names = ", ".join(known) or "none"
        raise GatewayError(f"there is no server {name!r}\n  remedy: name one of the servers file: {names}")
    return known[name]


async def login_server(
    entry: ConfiguredServer,
    write: Write,
    *,
    open_browser: OpenBrowser | None = webbrowser.open,
    timeout_s: float = 300.0,
) -> ServerStatus:
    """Logs a person in at a server, and connects to it with the new tokens; raises `GatewayError`."""
    async with Services() as services:
        credentials = _person_credentials(entry, services)
        challenge = await _ask_what_protects(entry, services)

        async def show_url(url: str) -> None:
            write(f"Log in to {entry.name} in your browser. If none opens, open this address:\n\n  {url}\n")
            if open_browser is not None:
                # Whatever a browser does, the address is printed.
                with anyio.move_on_after(BROWSER_S), suppress(Exception):
                    await to_thread.run_sync(open_browser, url, abandon_on_cancel=True)

        try:
            await log_in(credentials, challenge, show_url, timeout_s)
        except AuthError as error:
            remedy = f"\n  remedy: {error.remedy}" if error.remedy else ""
            raise GatewayError(f"login to {entry.name} failed: {error.reason}{remedy}") from None
        async with McpToolset(entry.name, entry.server, services=services) as toolset:
            status = toolset.status
    write(f"logged in; the tokens are in {credentials.file.path}")
    if status.state == "up":
        write(f"{entry.name} offers {status.tools} tools")
    else:
        write(f"{entry.name} is {status.state} all the same: {status.reason}")
    return status


async def logout_server(entry: ConfiguredServer, write: Write) -> None:
    """Revokes and removes the login of a server."""
    async with Services() as services:
        was_there = await log_out(_person_credentials(entry, services))
    write(f"logged out of {entry.name}" if was_there else f"there was no login to {entry.name}")


def _person_credentials(entry: ConfiguredServer, services: Services) -> PersonCredentials:
    credentials = build_credentials(entry.name, entry.server, services.http_clients.for_server(entry.server))
    if isinstance(credentials, PersonCredentials):
        return credentials
    raise GatewayError(
        f"nobody logs in to {entry.name}: it is a child process, or has credentials of its own "
        "(`auth_token`, `auth_command`, an `Authorization` header, or `grant: client_credentials`)\n"
        "  remedy: remove those from its entry, if a person is to log in"
    )


async def _ask_what_protects(entry: ConfiguredServer, services: Services) -> Challenge:
    """What the server's refusal asks for. A server that refuses nothing may still protect its tools."""
    asking = NoCredentials()
    async with McpToolset(entry.name, entry.server, services=services, credentials=asking) as toolset:
        status = toolset.status
    if asking.challenge is None and status.state != "up":
        raise GatewayError(f"{entry.name} cannot be reached: {status.reason}\n  remedy: {status.remedy}")
    return asking.challenge or Challenge()
