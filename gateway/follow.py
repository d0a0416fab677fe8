"""A gateway is kept up with its files: a new configuration is taken over whole, a wrong one is told and refused."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import anyio

from gateway.build import Plan, plan
from gateway.config.watch import changes
from gateway.errors import GatewayError
from gateway.gateway import Gateway

log = logging.getLogger(__name__)


@asynccontextmanager
async def following(gateway: Gateway, made: Plan, tools: Path | None, servers: Path | None) -> AsyncIterator[None]:
    """The gateway of a plan follows the files of that plan during a block."""
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_follow, gateway, made, tools, servers)
        yield
        tasks.cancel_scope.cancel()


async def _follow(gateway: Gateway, made: Plan, tools: Path | None, servers: Path | None) -> None:
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
