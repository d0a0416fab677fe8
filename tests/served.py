"""A gateway served over a real port from a thread of its own, so that clients of either event loop can reach it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import anyio
import anyio.abc
from anyio import from_thread, to_thread

from gateway.gateway import Gateway
from gateway.http.serve import Stop, serve
from gateway.http.settings import Settings


@dataclass
class Served:
    url: str
    gateway: Gateway
    stop: Callable[[], None]


class _Thread:
    """The server's side: its own loop, with the gateway made inside it."""

    def __init__(self, make: Callable[[], Gateway], settings: Settings, **more: Any) -> None:
        self._make, self._settings, self._more = make, settings, more
        self._portal_cm = from_thread.start_blocking_portal("asyncio", {"use_uvloop": True})

    def start(self) -> Served:
        self._portal = self._portal_cm.__enter__()
        self._done, served = self._portal.start_task(self._serve)
        return served  # type: ignore[no-any-return]

    async def _serve(self, *, task_status: anyio.abc.TaskStatus[Served]) -> None:
        stop, gateway = Stop(), self._make()
        self._stop = stop

        def ready(url: str) -> None:
            task_status.started(Served(url, gateway, lambda: self._portal.call(stop)))

        await serve(gateway, self._settings, stop=stop, ready=ready, **self._more)

    def end(self) -> None:
        try:
            self._portal.call(self._stop)
            self._done.result(timeout=20)
        finally:
            self._portal_cm.__exit__(None, None, None)


@asynccontextmanager
async def served(make: Callable[[], Gateway], settings: Settings | None = None, **more: Any) -> AsyncIterator[Served]:
    thread = _Thread(make, settings or Settings(port=0), **more)
    started = await to_thread.run_sync(thread.start)
    try:
        yield started
    finally:
        with anyio.CancelScope(shield=True):
            await to_thread.run_sync(thread.end)


async def until(holds: Callable[[], Any], within_s: float = 10) -> None:
    """Waits, within bounds, for something that happens on the other side."""
    with anyio.fail_after(within_s):
        while not holds():  # noqa: ASYNC110 - the other side is another thread, which has no event of ours to set
            await anyio.sleep(0.005)
