"""Serves a gateway on a real port from a separate thread, which its clients do not share."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any

import anyio
from anyio import from_thread, to_thread
from anyio.abc import TaskStatus
from starlette.types import ASGIApp

from gateway.gateway import Gateway
from gateway.http.app import build_app
from gateway.http.endpoint import DisconnectWatcher
from gateway.http.settings import Settings
from gateway.http.uvicorn_server import StopSignal, serve
from gateway.mcp_server.transports import build_mcp_app
from tests.waiting import PATIENCE_S


@dataclass
class LiveServer:
    url: str
    gateway: Gateway
    stop: Callable[[], None]


@contextmanager
def live_server(make: Callable[[], Gateway], settings: Settings | None = None, **more: Any) -> Iterator[LiveServer]:
    """Serves the gateway that `make` creates inside the server's own event loop."""

    async def main(*, task_status: TaskStatus[LiveServer]) -> None:
        stop, gateway = StopSignal(), make()

        def ready(url: str) -> None:
            task_status.started(LiveServer(url, gateway, lambda: portal.call(stop)))

        front, lifespan = build_mcp_app(gateway)
        at_mcp: dict[str, Any] = {"mounts": {"/mcp": front}, "background": (lifespan,)} | more
        mounts, served = at_mcp.pop("mounts"), settings or Settings(port=0)

        def build(disconnects: DisconnectWatcher) -> ASGIApp:
            return build_app(gateway, served, disconnects, mounts)

        await serve(gateway, served, stop=stop, ready=ready, **({"build": build} | at_mcp))

    # Between fork and exec, uvloop frees what other threads held, and process groups of torch wait there for ever. The
    # trainer therefore runs on asyncio's own loop.
    use_uvloop = "torch.distributed.tensor" not in sys.modules
    with from_thread.start_blocking_portal("asyncio", {"use_uvloop": use_uvloop}) as portal:
        done, at = portal.start_task(main)
        try:
            yield at
        finally:
            if not done.done():
                at.stop()
            done.result(timeout=PATIENCE_S)


@asynccontextmanager
async def live_server_async(
    make: Callable[[], Gateway], settings: Settings | None = None, **more: Any
) -> AsyncIterator[LiveServer]:
    """The same for an async test, whose event loop must not be blocked."""
    thread = live_server(make, settings, **more)
    at = await to_thread.run_sync(thread.__enter__)
    try:
        yield at
    finally:
        with anyio.CancelScope(shield=True):
            await to_thread.run_sync(thread.__exit__, None, None, None)
