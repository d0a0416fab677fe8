"""A simulated engine server: processor sharing in virtual time, so that no token needs an event of its own."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any, NamedTuple

from mtrl_plugins.plan.event_queue import EventQueue
from mtrl_plugins.plan.speeds import EngineSpeed

EPSILON = 1e-9
"""Of a token: what rounding may leave of a sequence that is finished."""


class Request(NamedTuple):
    """A turn that a server generates."""

    rollout: Any
    written: int
    """Tokens to generate."""
    prefill: int
    """Tokens to read first."""
    context: float
    """The mean number of tokens in its context while it runs."""


class SimulatedServer:
    """Every running sequence gets its tokens at the same pace, so each ends at a known number of decode steps. The
    clock of steps stands still while tokens are read into the cache, and while weights arrive."""

    def __init__(self, queue: EventQueue, speed: EngineSpeed, on_turn: Callable[[Any], None]) -> None:
        """`on_turn` gets a rollout whose turn is finished."""
        self._queue, self._speed, self._on_turn = queue, speed, on_turn
        self._running: list[tuple[float, int, Request]] = []
        """By the number of decode steps at which they end."""
        self._waiting: deque[Request] = deque()
        self._steps, self._context, self._stalled_s = 0.0, 0.0, 0.0
        self._last, self._arrivals, self._ticket = 0.0, 0, 0
        self.version = 0
        self.slowdown = 1.0
        """How much longer everything takes since the processor is shared."""
        self.on_busy: Callable[[], None] | None = None
        """Called when the server begins or ends to work."""
        self.busy_s = 0.0
        self.sequence_s = 0.0
        """Seconds of all running sequences together."""

    @property
    def requests(self) -> int:
        """Requests under way, running or waiting."""
        return len(self._running) + len(self._waiting)

    @property
    def is_busy(self) -> bool:
        return bool(self._running)

    def add(self, request: Request) -> None:
        """Starts a request, or queues it if the cache is full."""
        self.advance()
        if len(self._running) >= self._speed.max_running:
            self._waiting.append(request)
            return
        self._start(request)
        self._schedule()
        if len(self._running) == 1 and self.on_busy:
            self.on_busy()

    def stall(self, seconds: float) -> None:
        """Stops decoding for a time."""
        self.advance()
        self._stalled_s += seconds
        self._schedule()

    def set_slowdown(self, slowdown: float) -> None:
        """Changes the pace from now on."""
        self.advance()
        self.slowdown = slowdown
        self._schedule()

    def load(self, version: int, *, read_again: bool) -> None:
        """Takes new weights; running sequences read their tokens again, unless they keep their old keys and values."""
        self.version = version
        if self._running and read_again:
            self.stall(self._context * self._speed.prefill_s)

    def advance(self) -> None:
        """Brings the server's state up to the present time."""
        now = self._queue.now
        elapsed, self._last = now - self._last, now
        if elapsed <= 0:
            return
        running = len(self._running)
        if running:
            self.busy_s += elapsed
            self.sequence_s += elapsed * running
        work = elapsed / self.slowdown
        if self._stalled_s:
            stalled = min(self._stalled_s, work)
            self._stalled_s -= stalled
            work -= stalled
        if running and work > 0:
            self._steps += work / self._speed.step_s(running, self._context)

    def _start(self, request: Request) -> None:
        self._arrivals += 1
        self._context += request.context
        self._stalled_s += request.prefill * self._speed.prefill_s
        heappush(self._running, (self._steps + request.written, self._arrivals, request))

    def _schedule(self) -> None:
        """Sets the time of the next end; an earlier appointment is void."""
        self._ticket += 1
        if not self._running:
            self._context = 0.0  # What rounding left.
            return
        pace = self._speed.step_s(len(self._running), self._context)
        seconds = self._stalled_s + max(0.0, self._running[0][0] - self._steps) * pace
        self._queue.at(self._queue.now + seconds * self.slowdown, self._finish, self._ticket)

    def _finish(self, ticket: int) -> None:
        """Ends the sequences that are due."""
        if ticket != self._ticket:
            return
        self.advance()
        self._steps = max(self._steps, self._running[0][0])
        finished = []
        while self._running and self._running[0][0] <= self._steps + EPSILON:
            request = heappop(self._running)[2]
            self._context -= request.context
            finished.append(request.rollout)
        while self._waiting and len(self._running) < self._speed.max_running:
            self._start(self._waiting.popleft())
        self._schedule()
        if not self._running and self.on_busy:
            self.on_busy()
        for rollout in finished:
            self._on_turn(rollout)
