"""What `mtrl-gateway serve` runs: the gateway of the files or of a tape, over HTTP and MCP, kept up with its files."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import anyio

from gateway.build import Plan, plan
from gateway.config.watch import changes
from gateway.errors import GatewayError
from gateway.front.http import mount
from gateway.gateway import Gateway
from gateway.http.serve import run
from gateway.http.settings import Settings, read_token
from gateway.tape import Replay, recorded

log = logging.getLogger(__name__)


def settings_of(host: str, port: int, token_file: Path | None) -> Settings:
    return Settings(host=host, port=port, token=read_token(token_file) if token_file else None)


def serve_tape(tape: Path, settings: Settings) -> None:
    """Answers from a tape; there is nothing to watch, and nothing behind."""
    _serve(Replay(tape), settings)


def serve_files(tools: Path | None, servers: Path | None, settings: Settings, record: Path | None = None) -> None:
    """Serves what the files say, and follows them when they change."""
    made = plan(tools, servers)
    gateway = Gateway(made.sources, services=made.services)
    following = _following(gateway, made, tools, servers)
    _serve(recorded(gateway, record) if record else gateway, settings, following)


def _serve(gateway: Gateway, settings: Settings, *beside: AbstractAsyncContextManager[Any]) -> None:
    app, lifespan = mount(gateway, body_bytes=settings.body_bytes)
    run(gateway, settings, mounts={"/mcp": app}, beside=(lifespan, *beside))


@asynccontextmanager
async def _following(gateway: Gateway, made: Plan, tools: Path | None, servers: Path | None) -> AsyncIterator[None]:
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_follow, gateway, made, tools, servers)
        yield
        tasks.cancel_scope.cancel()


async def _follow(gateway: Gateway, made: Plan, tools: Path | None, servers: Path | None) -> None:
    """A new configuration is taken over whole; a wrong one is told, and the old one stays."""
    watched = {*made.config.files, *(path for path in (tools, servers) if path)}
    async with aclosing(changes(watched)) as changed:
        async for _ in changed:
            try:
                new = plan(tools, servers, made.services)
                await gateway.reload(new.sources)
            except GatewayError as error:
                log.error("the new configuration is refused, and the old one stays:\n%s", error)
            else:
                watched.update(new.config.files)
                log.warning("the configuration has changed: %d tools are offered", len(gateway.specs))
