"""How a server is reached is read off its configuration; only a bare URL leaves a choice."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Literal

from mcp.client._transport import TransportStreams

from gateway.config.models import Server
from gateway.upstream.child import Child
from gateway.upstream.services import Services
from gateway.upstream.sse import sse_client
from gateway.upstream.streamable import streamable_client

Way = Literal["stdio", "sse", "streamable-http"]


def ways(config: Server) -> tuple[Way, ...]:
    """The transports worth trying, in order."""
    if config.transport is not None:
        return (config.transport,)
    return ("stdio",) if config.command is not None else ("streamable-http", "sse")


@dataclass
class Line:
    """One way to one server, opened once."""

    way: Way
    config: Server
    services: Services
    probe: bool = True
    """Ask for the newer era first; needless where the server is known to speak the older one."""
    child: Child | None = None

    @asynccontextmanager
    async def open(self) -> AsyncIterator[TransportStreams]:
        if self.way == "stdio":
            async with self.services.places, self._start().open() as streams:
                yield streams
            return
        config, url = self.config, self.config.url or ""
        headers = {name: value.get_secret_value() for name, value in config.headers.items()}
        if config.auth_token is not None:
            headers["Authorization"] = f"Bearer {config.auth_token.get_secret_value()}"
        client = await self.services.web.client(url)
        speak = sse_client if self.way == "sse" else streamable_client
        async with speak(url, client, headers, config.result_bytes) as streams:
            yield streams

    def _start(self) -> Child:
        config = self.config
        self.child = Child(
            (config.command or "", *config.args),
            env=config.env,
            cwd=config.cwd,
            most_bytes=config.result_bytes,
            reaper=self.services.reaper,
        )
        return self.child
