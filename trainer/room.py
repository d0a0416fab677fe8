"""Room is limited: for rollouts under way by memory, and for those that write by the engine; waiting takes little."""

from __future__ import annotations

import heapq
from itertools import takewhile
from types import TracebackType
from typing import Self

import anyio

from trainer.config import Admission


class Places:
    """Room at the engine. Whoever began first goes first, so that a group is not overtaken by those behind it."""

    def __init__(self, count: int) -> None:
        self._free = count
        self._waiting: list[tuple[int, int, anyio.Event]] = []
        self._arrivals = 0

    async def take(self, rank: int) -> None:
        if self._free and not self._waiting:
            self._free -= 1
            return
        self._arrivals += 1
        turn = (rank, self._arrivals, anyio.Event())
        heapq.heappush(self._waiting, turn)
        try:
            await turn[2].wait()
        except BaseException:
            if turn[2].is_set():
                self.give()
            else:
                self._waiting.remove(turn)
                heapq.heapify(self._waiting)
            raise

    def give(self) -> None:
        if self._waiting:
            heapq.heappop(self._waiting)[2].set()
        else:
            self._free += 1


class Room:
    """Lets rollouts begin. Who neither writes nor is in line to write waits for a tool, an interaction or a session.

    One that waits longer than `patience_s` lends its room to the next. So only those keep others from beginning that
    had to do with the engine within the last `patience_s`, or `open + waiting` together, which is what memory holds: a
    slow server keeps those waiting who wait for it. Where all servers are quick nothing is lent, no more than `open`
    are under way, and each is over the sooner. Who is answered goes on without asking for room again, since it is
    further along than whoever has yet to begin.
    """

    def __init__(self, admission: Admission) -> None:
        self._open, self._most = admission.open, admission.open + admission.waiting
        self._patience_s = admission.patience_s
        self._writing = Places(admission.writing)
        self._begun = self._inside = 0
        self._away: dict[int, float] = {}
        """By rank, until when its place is its own: soonest first."""
        self._left = anyio.Event()

    async def enter(self) -> Stay:
        """Waits until one more may begin; whoever has the stay must leave."""
        while not self._fits:
            with anyio.move_on_after(self._next_s):
                await self._left.wait()
        self._begun += 1
        self._inside += 1
        return Stay(self, self._writing, self._begun)

    def leave(self, rank: int) -> None:
        self.near(rank)
        self._inside -= 1
        self._left.set()
        self._left = anyio.Event()

    def away(self, rank: int) -> None:
        self._away[rank] = anyio.current_time() + self._patience_s

    def near(self, rank: int) -> None:
        self._away.pop(rank, None)

    @property
    def _fits(self) -> bool:
        now = anyio.current_time()
        lent = sum(1 for _ in takewhile(lambda until: until <= now, self._away.values()))
        return self._inside < self._most and self._inside - lent < self._open

    @property
    def _next_s(self) -> float:
        """Until one more place may be lent: whoever goes away only now has patience for as long as anyone."""
        now = anyio.current_time()
        return next((until - now for until in self._away.values() if until > now), self._patience_s)


class Stay:
    """One rollout's time in the room; it enters the stay whenever it wants to write, and is away otherwise."""

    def __init__(self, room: Room, writing: Places, rank: int) -> None:
        self._room, self._writing, self._rank = room, writing, rank
        room.away(rank)

    async def __aenter__(self) -> Self:
        self._room.near(self._rank)
        try:
            await self._writing.take(self._rank)
        except BaseException:
            self._room.away(self._rank)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._writing.give()
        self._room.away(self._rank)

    def leave(self) -> None:
        self._room.leave(self._rank)
