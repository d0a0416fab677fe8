"""Limits on rollouts: how many are under way at once, and for how many of them the engine generates."""

from __future__ import annotations

import heapq
from itertools import takewhile
from typing import Self

import anyio

from trainer.rollout.settings import ConcurrencySettings


class EngineSlots:
    """A semaphore for generations. Rollouts that started earlier go first, so that a group is not overtaken."""

    def __init__(self, count: int) -> None:
        self._free = count
        self._waiters: list[tuple[int, int, anyio.Event]] = []
        self._arrivals = 0

    async def acquire(self, rank: int) -> None:
        """Waits for a slot; waiters with a lower rank go first."""
        if self._free and not self._waiters:
            self._free -= 1
            return
        self._arrivals += 1
        waiter = (rank, self._arrivals, anyio.Event())
        heapq.heappush(self._waiters, waiter)
        try:
            await waiter[2].wait()
        except BaseException:
            if waiter[2].is_set():
                self.release()
            else:
                self._waiters.remove(waiter)
                heapq.heapify(self._waiters)
            raise

    def release(self) -> None:
        """Passes the slot to the next waiter."""
        if self._waiters:
            heapq.heappop(self._waiters)[2].set()
        else:
            self._free += 1


PATIENCE_S = 1.0
"""A rollout that waits longer than this for a tool, an interaction or a session lets one more start."""
MAX_WAITING = 1024
"""The most rollouts that may wait longer than that, which bounds memory when a server is slow."""
DEFAULT = ConcurrencySettings()


class Admission:
    """Decides when rollouts may start.

    A rollout that neither generates nor waits for the engine is waiting for a tool, an interaction or a session. After
    `patience_s` of that, it no longer counts as in flight, so another one may start: a slow server delays only the
    rollouts that use it. At most `inflight_rollouts + waiting` are under way, which bounds memory. With fast servers at
    most `inflight_rollouts` are under way, and each finishes sooner. A rollout whose answer arrives continues without
    asking again, since it is further along than one that has yet to start.
    """

    def __init__(
        self, settings: ConcurrencySettings = DEFAULT, *, patience_s: float | None = None, waiting: int | None = None
    ) -> None:
        self._open = settings.inflight_rollouts
        self._max_running = self._open + (MAX_WAITING if waiting is None else waiting)
        self._patience_s = PATIENCE_S if patience_s is None else patience_s
        self._engine_slots = EngineSlots(settings.running_requests)
        self._started = self._running = 0
        self._idle_deadlines: dict[int, float] = {}
        """By rank, when a rollout that waits for an answer stops counting as in flight; soonest first."""
        self._changed = anyio.Event()

    async def acquire(self) -> AdmissionSlot:
        """Waits until one more rollout may start; the caller must release the slot."""
        while not self._has_room:
            with anyio.move_on_after(self._next_deadline_s):
                await self._changed.wait()
        self._started += 1
        self._running += 1
        return AdmissionSlot(self, self._engine_slots, self._started)

    def release(self, rank: int) -> None:
        """Ends the rollout of this rank."""
        self.mark_busy(rank)
        self._running -= 1
        self._changed.set()
        self._changed = anyio.Event()

    def mark_idle(self, rank: int) -> None:
        """The rollout now waits for something other than the engine."""
        self._idle_deadlines[rank] = anyio.current_time() + self._patience_s

    def mark_busy(self, rank: int) -> None:
        """The rollout now generates, or waits to."""
        self._idle_deadlines.pop(rank, None)

    @property
    def _has_room(self) -> bool:
        now = anyio.current_time()
        overdue = sum(1 for _ in takewhile(lambda deadline: deadline <= now, self._idle_deadlines.values()))
        return self._running < self._max_running and self._running - overdue < self._open

    @property
    def _next_deadline_s(self) -> float:
        """Seconds until one more rollout may stop counting; one that becomes idle only now has the full patience."""
        now = anyio.current_time()
        return next((deadline - now for deadline in self._idle_deadlines.values() if deadline > now), self._patience_s)


class AdmissionSlot:
    """One rollout's permission to run. As a context manager it holds an engine slot, for one generation."""

    def __init__(self, admission: Admission, engine_slots: EngineSlots, rank: int) -> None:
        self._admission, self._engine_slots, self._rank = admission, engine_slots, rank
        self._generations = 0
        """Generations under way, or waiting to be; an agent may ask for several at once."""
        self._is_released = False
        admission.mark_idle(rank)

    async def __aenter__(self) -> Self:
        self._generations += 1
        self._admission.mark_busy(self._rank)
        try:
            await self._engine_slots.acquire(self._rank)
        except BaseException:
            self._end_generation()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        self._engine_slots.release()
        self._end_generation()

    def release(self) -> None:
        """Ends the rollout."""
        self._is_released = True
        self._admission.release(self._rank)

    def _end_generation(self) -> None:
        self._generations -= 1
        if not self._generations and not self._is_released:
            self._admission.mark_idle(self._rank)
