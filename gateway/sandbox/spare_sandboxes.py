"""Sandboxes that are started before a rollout needs one. Each is given to one rollout, and never comes back."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Awaitable, Callable

import anyio

from gateway.sandbox.provider import Sandbox

log = logging.getLogger(__name__)

RETRY_S = 5.0
"""How long to wait after a spare could not be started. A rollout that finds none starts its own, and tells why."""


class SpareSandboxes:
    """Keeps some sandboxes ready."""

    def __init__(self, start: Callable[[], Awaitable[Sandbox]], count: int) -> None:
        self._start, self._count = start, count
        self._ready: deque[Sandbox] = deque()
        self._taken = anyio.Event()

    @property
    def ready(self) -> int:
        return len(self._ready)

    async def take(self) -> Sandbox | None:
        """A sandbox that is ready, if there is one."""
        while self._ready:
            sandbox = self._ready.popleft()
            self._taken.set()
            if sandbox.alive and not sandbox.has_ended:
                return sandbox
            await sandbox.stop()
        return None

    async def run(self) -> None:
        """Starts what is missing, until it is cancelled; then all are stopped."""
        try:
            while True:
                self._taken = anyio.Event()
                if len(self._ready) < self._count:
                    await self._add()
                else:
                    await self._taken.wait()
        finally:
            with anyio.CancelScope(shield=True):
                while self._ready:
                    await self._ready.popleft().stop()

    async def _add(self) -> None:
        try:
            self._ready.append(await self._start())
        except Exception as error:  # boundary: whatever a start fails at, it must not end the other tools
            log.warning("a spare sandbox could not be started: %s", error)
            await anyio.sleep(RETRY_S)
