"""Simulated rollouts: admission, engine slots, routing, turns and tools, as `trainer.rollout` has them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from random import Random

from mtrl_plugins.plan.event_queue import EventQueue
from mtrl_plugins.plan.simulated_server import Request, SimulatedServer
from mtrl_plugins.plan.workload import JobLimits, RolloutScript, Workload

CROWDED = 32
"""Requests above which a server may be too busy for a rollout that it has in its cache, as in the engine's routing."""
CROWDED_RATIO = 1.5
LOOK_AGAIN = 64
"""The idlest server is looked for once in this many requests: with a thousand servers, looking costs."""


class SimulatedGroup:
    """The attempts at one task."""

    __slots__ = ("cached", "first_version", "has_signal", "home", "left", "number", "scripts", "tokens", "written")

    def __init__(self, number: int, scripts: Sequence[RolloutScript], has_signal: bool) -> None:
        self.number, self.scripts, self.has_signal = number, scripts, has_signal
        self.left = len(scripts)
        self.home: int | None = None
        self.cached: tuple[int, int] | None = None
        """The server that has read the prompt, and under which version."""
        self.first_version: int | None = None
        """The version of its oldest token."""
        last = [script[-1] for script in scripts]
        shared = min(scripts[0][0].prompt, *(turn.prompt for turn in last))  # A history that is rewritten may shrink.
        self.tokens = sum(turn.prompt + turn.written for turn in last) - (len(last) - 1) * shared
        """Tokens of the rows in an update, with the prompt shared."""
        self.written = sum(turn.written for script in scripts for turn in script)


class SimulatedRollout:
    """One attempt."""

    __slots__ = ("context", "group", "idle", "is_overdue", "rank", "script", "server", "turn", "version")

    def __init__(self, group: SimulatedGroup, script: RolloutScript) -> None:
        self.group, self.script = group, script
        self.turn = self.rank = self.idle = self.context = 0
        self.server, self.version = -1, -1
        self.is_overdue = False


NextGroup = Callable[[], SimulatedGroup | None]


class SimulatedRollouts:
    """Plays rollouts on servers."""

    def __init__(
        self, queue: EventQueue, limits: JobLimits, workload: Workload, seed: int, host_workers: float
    ) -> None:
        self._queue, self._limits, self._workload = queue, limits, workload
        self._random = Random(seed)  # noqa: S311 - draws, no secrets
        self._host_rate, self._host_free = host_workers, 0.0
        self.servers: list[SimulatedServer] = []
        self.next_group: NextGroup = lambda: None
        """The next group to start, if there is one now; `fill` asks again."""
        self.on_group: Callable[[SimulatedGroup], None] = lambda group: None
        """Gets a finished group."""
        self.started = self.ended = self.most_running = 0
        self.host_s = 0.0
        self._to_start: list[SimulatedRollout] = []
        self._overdue, self._idle = 0, deque[tuple[float, SimulatedRollout, int]]()
        self._has_alarm = False
        self._free_slots, self._slot_queue = limits.writing, list[tuple[int, int, SimulatedRollout]]()
        self._groups, self._requests, self._idlest = 0, 0, 0

    @property
    def running(self) -> int:
        """Rollouts under way."""
        return self.started - self.ended

    def draw_group(self) -> SimulatedGroup:
        """A group as the recorded ones are."""
        draw, workload, number = self._random.random, self._workload, self._groups
        self._groups += 1
        recorded = workload.groups[int(draw() * len(workload.groups))]
        scripts = [recorded[int(draw() * len(recorded))] for _ in range(self._limits.n)]
        return SimulatedGroup(number, scripts, draw() < workload.signal_share)

    def fill(self) -> None:
        """Starts rollouts in order, as admission allows."""
        while True:
            if not self._to_start:
                group = self.next_group()
                if group is None:
                    return
                self._to_start = [SimulatedRollout(group, script) for script in reversed(group.scripts)]
            while self._to_start:
                if not self._has_room():
                    return self._set_alarm()
                self._begin(self._to_start.pop())

    def _has_room(self) -> bool:
        idle, now = self._idle, self._queue.now
        while idle and idle[0][0] <= now:
            _, rollout, ticket = idle.popleft()
            if rollout.idle == ticket:
                rollout.is_overdue = True
                self._overdue += 1
        limits, running = self._limits, self.running
        return running < limits.open + limits.waiting and running - self._overdue < limits.open

    def _set_alarm(self) -> None:
        """Looks again for room when the next rollout may have been idle for too long to count."""
        if self._idle and not self._has_alarm:
            self._has_alarm = True
            self._queue.at(self._idle[0][0], self._on_alarm, None)

    def _on_alarm(self, _: None) -> None:
        self._has_alarm = False
        self.fill()

    def _begin(self, rollout: SimulatedRollout) -> None:
        self.started += 1
        rollout.rank = self.started
        self.most_running = max(self.most_running, self.running)
        self._mark_idle(rollout)
        self._queue.at(self._use_host(self._workload.host_rollout_s), self._request, rollout)

    def _use_host(self, seconds: float) -> float:
        """The time at which the process that plays rollouts has done more work."""
        seconds /= self._host_rate
        self.host_s += seconds
        self._host_free = max(self._host_free, self._queue.now) + seconds
        return self._host_free

    def _mark_idle(self, rollout: SimulatedRollout) -> None:
        rollout.idle += 1
        self._idle.append((self._queue.now + self._limits.patience_s, rollout, rollout.idle))
        if self._to_start:
            self._set_alarm()

    def _mark_busy(self, rollout: SimulatedRollout) -> None:
        rollout.idle += 1
        if rollout.is_overdue:
            rollout.is_overdue = False
            self._overdue -= 1

    def _request(self, rollout: SimulatedRollout) -> None:
        """Asks for an engine slot; rollouts that started earlier go first."""
        self._mark_busy(rollout)
        if self._free_slots and not self._slot_queue:
            self._free_slots -= 1
            self._generate(rollout)
        else:
            self._requests += 1
            heappush(self._slot_queue, (rollout.rank, self._requests, rollout))

    def _generate(self, rollout: SimulatedRollout) -> None:
        turn, group = rollout.script[rollout.turn], rollout.group
        index = self._route(rollout)
        server = self.servers[index]
        is_cached = (rollout.server, rollout.version) == (index, server.version)
        prefill = turn.prompt
        if is_cached and turn.prompt >= rollout.context:
            prefill -= rollout.context
        elif not rollout.turn and group.cached == (index, server.version):
            prefill = 0
        if not rollout.turn:
            group.cached = (index, server.version)
        if group.first_version is None:
            group.first_version = server.version
        rollout.server = index
        written = max(1, turn.written)
        server.add(Request(rollout, written, prefill, turn.prompt + written / 2))

    def _route(self, rollout: SimulatedRollout) -> int:
        """The server that has the rollout's tokens, or else its group's, unless that one is crowded."""
        servers, group = self.servers, rollout.group
        if len(servers) == 1:
            return 0
        self._requests += 1
        if self._requests % LOOK_AGAIN == 0 or group.home is None:
            counts = [server.requests for server in servers]
            self._idlest = counts.index(min(counts))
        home = rollout.server if rollout.server >= 0 else group.home
        if home is None:
            group.home = home = self._idlest
        requests = servers[home].requests
        is_crowded = requests > CROWDED and requests > CROWDED_RATIO * servers[self._idlest].requests
        return self._idlest if is_crowded else home

    def finish_turn(self, rollout: SimulatedRollout) -> None:
        """A server has generated a rollout's turn."""
        if self._slot_queue:
            self._generate(heappop(self._slot_queue)[2])
        else:
            self._free_slots += 1
        self._mark_idle(rollout)
        turn = rollout.script[rollout.turn]
        rollout.turn += 1
        rollout.context = turn.prompt + turn.written
        rollout.version = self.servers[rollout.server].version
        done = self._use_host(self._workload.host_turn_s)
        if rollout.turn == len(rollout.script):
            self._queue.at(done + turn.answer_s, self._end, rollout)
        else:
            self._queue.at(done + turn.answer_s, self._request, rollout)

    def _end(self, rollout: SimulatedRollout) -> None:
        self._mark_busy(rollout)
        self.ended += 1
        group = rollout.group
        group.left -= 1
        if not group.left:
            self.on_group(group)
        self.fill()
