"""Transports to MCP servers: a child process, SSE or streamable HTTP; and what all servers of a gateway share."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Self

import anyio

from gateway.config.models import Server
from gateway.mcp_client.auth.credentials import Credentials
from gateway.mcp_client.child_process import ChildProcess
from gateway.mcp_client.dispatcher import Dispatcher
from gateway.mcp_client.framing import Inbox
from gateway.mcp_client.http_client import AuthorizedClient, HttpClients
from gateway.mcp_client.rollout_folder import LISTING, RolloutIdentity, StartSettings, open_folder, resolve_start
from gateway.mcp_client.sandboxed_server import open_sandboxed
from gateway.mcp_client.server_status import ServerLog
from gateway.mcp_client.sse import sse_client
from gateway.mcp_client.streamable_http import streamable_client
from gateway.process.reaper import Reaper
from gateway.sandbox.sandboxed_command import SandboxedCommand


@dataclass
class Services:
    """What all MCP servers of a gateway share: HTTP clients, the reaper, and a limit on child processes.

    Entered before the first server and exited after the last one.
    """

    max_children: int = 512
    """Limit on the child processes of all servers together."""
    http_clients: HttpClients = field(default_factory=HttpClients)
    reaper: Reaper = field(default_factory=Reaper)

    def __post_init__(self) -> None:
        self.child_slots = anyio.Semaphore(self.max_children)

    async def __aenter__(self) -> Self:
        self._tasks = anyio.create_task_group()
        await self._tasks.__aenter__()
        self._tasks.start_soon(self.http_clients.close_expired)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._tasks.cancel_scope.cancel()
        try:
            await self._tasks.__aexit__(None, None, None)
        finally:  # It raises where this task was cancelled.
            await self.reaper.stop()
            await self.http_clients.aclose()


TransportName = Literal["stdio", "sse", "streamable-http"]


def candidate_transports(config: Server) -> tuple[TransportName, ...]:
    """The transports to try, in order; only a bare URL leaves a choice."""
    if config.transport is not None:
        return (config.transport,)
    return ("stdio",) if config.command is not None else ("streamable-http", "sse")


@dataclass
class Transport:
    """One transport to one server; opened once."""

    name: TransportName
    config: Server
    services: Services
    server_name: str = ""
    version: str | None = None
    """The protocol version to use; None tries a modern one first, then the handshake."""
    rollout: RolloutIdentity = LISTING
    """The rollout that the process of a server is started for."""
    credentials: Credentials | None = None
    """Headers that change with time; those of the configuration are fixed."""
    log: ServerLog = field(default_factory=ServerLog)
    """Where the standard error of a server's process is kept."""
    child: ChildProcess | None = None
    sandbox: SandboxedCommand | None = None
    """The sandbox that the server's process is in."""
    folder: Path | None = None
    """The folder of that rollout, if the server uses one."""

    @asynccontextmanager
    async def open(self, dispatcher: Dispatcher) -> AsyncIterator[None]:
        """Passes what comes to the dispatcher during the block, and takes what it sends."""
        if self.name == "stdio":
            folder = open_folder(self.config, self.rollout, self.services.reaper)
            async with self.services.child_slots, folder as self.folder, self._open_child(dispatcher):
                yield
            return
        config, url = self.config, self.config.url or ""
        headers = {name: value.get_secret_value() for name, value in config.headers.items()}
        if config.auth_token is not None:
            headers["Authorization"] = f"Bearer {config.auth_token.get_secret_value()}"
        client = AuthorizedClient(await self.services.http_clients.for_server(config)(url), self.credentials)
        open_client = sse_client if self.name == "sse" else streamable_client
        inbox = Inbox(dispatcher, config.result_bytes, config.result_values, takes_any_id=self.name == "sse")
        async with open_client(url, client, headers, inbox) as dispatcher.outbox:
            yield

    @asynccontextmanager
    async def _open_child(self, dispatcher: Dispatcher) -> AsyncIterator[None]:
        start, reaper = resolve_start(self.config, self.rollout, self.folder), self.services.reaper
        if self.config.isolation == "sandbox":
            sandbox = open_sandboxed(self.config, start, self.folder, reaper)
            async with sandbox as (confined, self.sandbox), self._create_child(confined).open(dispatcher):
                yield
            return
        async with self._create_child(start).open(dispatcher):
            yield

    def _create_child(self, start: StartSettings) -> ChildProcess:
        self.child = ChildProcess(
            start.command,
            name=self.server_name,
            env=start.env,
            cwd=start.cwd,
            max_bytes=self.config.result_bytes,
        )
        self.child.log, self.child.max_values = self.log, self.config.result_values
        return self.child
