"""Servers that are still starting: their names, and how long a gateway, its listings and its sessions wait for them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

import anyio

LATE_TOOL_S = 10.0
"""How long a request for an unknown tool waits while servers are starting that may have it."""
PROGRESS_S = 1.0
"""Interval of the calls of `on_wait`."""

OnWait = Callable[[int, Sequence[str]], None]
"""Called while a gateway waits, with the number of servers and the names of those that are late; none at the end."""


@runtime_checkable
class StartingServer(Protocol):
    """A toolset that connects to its server in the background."""

    name: str
    connects_in_background: bool
    """Whether entering the toolset does not wait for the first attempt to connect."""
    start_is_reported: bool
    """Whether somebody else tells that it cannot be started."""

    async def wait_started(self) -> None:
        """Returns when the first attempt to connect has ended, whether it succeeded or not."""
        ...


class ServerStart:
    """The start of a gateway's servers. `listen_first`: the gateway is entered at once and its listings wait instead.

    `wait_s` bounds that wait, counted from the start of the servers. `is_reported`: who enters the gateway tells of the
    servers that did not start, so that they need not be logged.
    """

    def __init__(
        self,
        *,
        listen_first: bool = False,
        wait_s: float = math.inf,
        on_wait: OnWait | None = None,
        is_reported: bool = False,
    ) -> None:
        self.is_reported = is_reported
        self.listen_first, self.wait_s, self._on_wait = listen_first, wait_s, on_wait
        self._starting: dict[int, str] = {}
        self._deadline = -math.inf

    @property
    def names(self) -> list[str]:
        """The servers that are starting, in alphabetical order."""
        return sorted(self._starting.values()) if self._starting else []

    def begin(self) -> None:
        """Starts the time in which listings wait."""
        self._changed = anyio.Event()
        self._deadline = anyio.current_time() + self.wait_s

    def add(self, server: StartingServer) -> None:
        self._starting[id(server)] = server.name

    async def follow(self, server: StartingServer) -> None:
        """Waits until the server has started or failed, and wakes those who wait for it."""
        try:
            await server.wait_started()
        finally:
            self._starting.pop(id(server), None)
            changed, self._changed = self._changed, anyio.Event()
            changed.set()

    async def wait(self, until: Callable[[], bool] = lambda: False, *, deadline: float = math.inf) -> None:
        """Waits while servers are starting, until the condition holds or the deadline has passed."""
        if not self._starting:
            return
        with anyio.move_on_after(deadline - anyio.current_time()):
            while self._starting and not until():
                await self._changed.wait()

    async def wait_for_all(self) -> None:
        """Waits for all servers until the time for waiting is over, and reports who is late."""
        total = len(self._starting)
        try:
            while self._starting and anyio.current_time() < self._deadline:
                if self._on_wait is not None:
                    self._on_wait(total, self.names)
                await self.wait(deadline=min(self._deadline, anyio.current_time() + PROGRESS_S))
        finally:
            if self._on_wait is not None:
                self._on_wait(total, ())

    async def settle(self) -> None:
        """Waits before a listing, so that a client which asks early sees the servers that start quickly."""
        await self.wait(deadline=self._deadline)

    async def wait_for_tools(self, has_tools: Callable[[], bool]) -> None:
        """Waits for tools that a request names and that a starting server may have."""
        if not has_tools():
            await self.wait(has_tools, deadline=anyio.current_time() + LATE_TOOL_S)


def describe_starting(names: Sequence[str]) -> str:
    """`server 'a' is still starting`."""
    listed = ", ".join(repr(name) for name in names)
    return f"server {listed} is still starting" if len(names) == 1 else f"servers {listed} are still starting"
