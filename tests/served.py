"""A gateway served over a real port from a thread of its own, so that clients of either event loop can reach it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any

import anyio
from anyio import from_thread, to_thread
from anyio.abc import TaskStatus

from gateway.front.http import mount
from gateway.gateway import Gateway
from gateway.http.serve import Stop, serve
from gateway.http.settings import Settings


@dataclass
class Served:
    url: str
    gateway: Gateway
    stop: Callable[[], None]


@contextmanager
def serving(make: Callable[[], Gateway], settings: Settings | None = None, **more: Any) -> Iterator[Served]:
    """The server's side has its own loop, with the gateway made inside it."""

    async def main(*, task_status: TaskStatus[Served]) -> None:
        stop, gateway = Stop(), make()

        def ready(url: str) -> None:
            task_status.started(Served(url, gateway, lambda: portal.call(stop)))

        front, lifespan = mount(gateway)
        at_mcp: dict[str, Any] = {"mounts": {"/mcp": front}, "beside": (lifespan,)}
        await serve(gateway, settings or Settings(port=0), stop=stop, ready=ready, **(at_mcp | more))

    with from_thread.start_blocking_portal("asyncio", {"use_uvloop": True}) as portal:
        done, at = portal.start_task(main)
        try:
            yield at
        finally:
            if not done.done():
                at.stop()
            done.result(timeout=20)


@asynccontextmanager
async def served(make: Callable[[], Gateway], settings: Settings | None = None, **more: Any) -> AsyncIterator[Served]:
    """The same, for a test that has a loop of its own and must not block it."""
    thread = serving(make, settings, **more)
    at = await to_thread.run_sync(thread.__enter__)
    try:
        yield at
    finally:
        with anyio.CancelScope(shield=True):
            await to_thread.run_sync(thread.__exit__, None, None, None)


async def until(holds: Callable[[], Any], within_s: float = 10) -> None:
    """Waits, within bounds, for something that happens on the other side."""
    with anyio.fail_after(within_s):
        while not holds():  # noqa: ASYNC110 - the other side is another thread, which has no event of ours to set
            await anyio.sleep(0.005)
