"""Simulates steps of a training run: waiting for rollouts, update, publish, and what everyone did meanwhile."""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from heapq import heappop, heappush
from random import Random
from statistics import median
from typing import Any, NamedTuple, Protocol

from mtrl_plugins.plan.speeds import Cluster, EngineSpeed
from mtrl_plugins.plan.workload import JobLimits, RolloutScript, Workload


class Signal:
    """Something that processes wait for."""

    def __init__(self) -> None:
        self.waiters: list[Process] = []


Process = Iterator[float | Signal]
"""A generator that yields seconds to wait, or a signal to wait for."""


class EventQueue:
    """Runs actions at simulated times; those of the same time run in the order in which they were added."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[Any], None], Any]] = []
        self._added = 0
        self._is_stopped = False

    def at(self, time: float, action: Callable[[Any], None], argument: Any) -> None:
        """Calls `action(argument)` at a time, which must not be in the past."""
        self._added += 1
        heappush(self._events, (time, self._added, action, argument))

    def start(self, process: Process) -> None:
        """Runs a process until its first wait."""
        self._resume(process)

    def notify(self, signal: Signal) -> None:
        """Resumes the processes that wait for a signal, after the events of this moment that were added before."""
        waiters, signal.waiters = signal.waiters, []
        for process in waiters:
            self.at(self.now, self._resume, process)

    def stop(self) -> None:
        """Ends `run` after the present event."""
        self._is_stopped = True

    def run(self) -> None:
        """Runs events until there are no more, or until `stop`."""
        events = self._events
        while events and not self._is_stopped:
            self.now, _, action, argument = heappop(events)
            action(argument)

    def _resume(self, process: Process) -> None:
        try:
            wait = next(process)
        except StopIteration:
            return
        if isinstance(wait, Signal):
            wait.waiters.append(process)
        else:
            self.at(self.now + wait, self._resume, process)


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

    def stall(self, seconds: float) -> None:
        """Stops decoding for a time."""
        self.advance()
        self._stalled_s += seconds
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
        work = elapsed
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
        self._queue.at(self._queue.now + seconds, self._finish, self._ticket)

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
        for rollout in finished:
            self._on_turn(rollout)


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


@dataclass
class SimulatedBatch:
    """What a step trains on."""

    groups: list[SimulatedGroup] = field(default_factory=list)
    replaced: int = 0
    dropped: int = 0

    @property
    def tokens(self) -> int:
        """Tokens of the rows with a gradient."""
        return sum(group.tokens for group in self.groups if group.has_signal)

    @property
    def written(self) -> int:
        return sum(group.written for group in self.groups)

    def staleness(self, version: int) -> int:
        """Versions, of the oldest token."""
        return max((_staleness(group, version) for group in self.groups), default=0)


Take = Generator[float | Signal, None, SimulatedBatch]


class SimulatedSource(Protocol):
    """Where a simulated step takes its groups from."""

    def take(self, step: int) -> Take: ...

    def wait_until_idle(self) -> Process: ...

    def on_published(self) -> None: ...


def make_simulated_source(
    queue: EventQueue, rollouts: SimulatedRollouts, limits: JobLimits, version: Callable[[], int]
) -> SimulatedSource:
    """The source of a mode; `version` returns the version of the servers' weights."""
    match limits.mode:
        case "synchronous":
            return SimulatedSync(queue, rollouts, limits)
        case "one_step_off":
            return SimulatedOneStepOff(queue, rollouts, limits)
        case _:
            return SimulatedAsync(queue, rollouts, limits, version)


class SimulatedSync:
    """Nothing runs outside of `take`."""

    def __init__(self, queue: EventQueue, rollouts: SimulatedRollouts, limits: JobLimits) -> None:
        self._queue, self._rollouts, self._limits = queue, rollouts, limits
        self._changed = Signal()
        self._to_start: deque[SimulatedGroup] = deque()
        self._finished: list[SimulatedGroup] = []
        rollouts.next_group = lambda: self._to_start.popleft() if self._to_start else None
        rollouts.on_group = self._on_group

    def take(self, step: int) -> Take:
        return (yield from self.collect())

    def wait_until_idle(self) -> Process:
        yield from ()

    def on_published(self) -> None:
        pass

    def collect(self) -> Take:
        """A step's groups; those without a signal are replaced, up to `draws` times."""
        batch, missing = SimulatedBatch(), self._limits.prompts
        for draw in range(self._limits.draws + 1):
            self._finished = []
            self._to_start.extend(self._rollouts.draw_group() for _ in range(missing))
            self._rollouts.fill()
            while len(self._finished) < missing:
                yield self._changed
            batch.groups += self._finished
            if draw == self._limits.draws:
                break
            kept = [group for group in batch.groups if group.has_signal]
            batch.replaced += len(batch.groups) - len(kept)
            batch.groups, missing = kept, self._limits.prompts - len(kept)
            if not missing:
                break
        return batch

    def _on_group(self, group: SimulatedGroup) -> None:
        self._finished.append(group)
        self._queue.notify(self._changed)


class SimulatedOneStepOff(SimulatedSync):
    """The next step's groups are made during a step."""

    def __init__(self, queue: EventQueue, rollouts: SimulatedRollouts, limits: JobLimits) -> None:
        super().__init__(queue, rollouts, limits)
        self._next: SimulatedBatch | None = None
        self._has_started = False
        self._done = Signal()

    def take(self, step: int) -> Take:
        if not self._has_started:
            self._start()
        while (batch := self._next) is None:
            yield self._done
        if step < self._limits.steps:
            self._start()
        return batch

    def wait_until_idle(self) -> Process:
        while self._next is None:
            yield self._done

    def _start(self) -> None:
        self._has_started, self._next = True, None
        self._queue.start(self._collect_next())

    def _collect_next(self) -> Process:
        self._next = yield from self.collect()
        self._queue.notify(self._done)


class SimulatedAsync:
    """Groups start continuously; how many are open is limited to what steps can take before they are too stale."""

    def __init__(
        self, queue: EventQueue, rollouts: SimulatedRollouts, limits: JobLimits, version: Callable[[], int]
    ) -> None:
        self._queue, self._rollouts, self._limits, self._version = queue, rollouts, limits, version
        self._changed = Signal()
        self._finished: list[tuple[int, SimulatedGroup]] = []
        """By number: the oldest is taken first."""
        self._open = self._taken = 0
        rollouts.next_group, rollouts.on_group = self._next_group, self._on_group

    @property
    def _max_open(self) -> int:
        last_step = min(self._version() + self._limits.max_staleness + 1, self._limits.steps)
        return last_step * self._limits.prompts - self._taken

    def take(self, step: int) -> Take:
        """The oldest finished groups; those that are too stale are dropped."""
        self._rollouts.fill()
        batch, prompts = SimulatedBatch(), self._limits.prompts
        while len(batch.groups) < prompts:
            while not self._finished:
                yield self._changed
            group = heappop(self._finished)[1]
            self._open -= 1
            if _staleness(group, self._version()) > self._limits.max_staleness:
                batch.dropped += 1
            elif not group.has_signal and batch.replaced < self._limits.draws * prompts:
                batch.replaced += 1
            else:
                batch.groups.append(group)
                self._taken += 1
            self._rollouts.fill()
        return batch

    def wait_until_idle(self) -> Process:
        yield from ()

    def on_published(self) -> None:
        self._rollouts.fill()

    def _next_group(self) -> SimulatedGroup | None:
        if self._open >= self._max_open:
            return None
        self._open += 1
        return self._rollouts.draw_group()

    def _on_group(self, group: SimulatedGroup) -> None:
        heappush(self._finished, (group.number, group))
        self._queue.notify(self._changed)


def _staleness(group: SimulatedGroup, version: int) -> int:
    return version - (version if group.first_version is None else group.first_version)


@dataclass(frozen=True, slots=True)
class SimulatedStep:
    """One step, from the publish before it to its own."""

    seconds: float
    waiting_s: float
    """Seconds in which the trainer waited for rollouts, before the update and after it."""
    learning_s: float
    publishing_s: float
    taken_s: float
    """Seconds until the step had its groups."""
    engine_busy_s: float
    """Seconds in which servers generated, of all servers together."""
    sequence_s: float
    """Seconds of all running sequences together."""
    host_s: float
    """Seconds in which the processes that play rollouts worked."""
    written: int
    """Tokens in the groups that the step took."""
    staleness: int
    """Versions, of the oldest token."""
    dropped: int
    replaced: int


@dataclass(frozen=True, slots=True)
class Simulation:
    """A simulated run."""

    steps: tuple[SimulatedStep, ...]
    servers: int
    started: int
    ended: int
    under_way: int
    """Rollouts that had not ended when the simulation did."""
    most_under_way: int

    @property
    def step_s(self) -> float:
        """The median step."""
        return median(step.seconds for step in self.steps)

    @property
    def seconds(self) -> float:
        return sum(step.seconds for step in self.steps)

    @property
    def engine_idle(self) -> float:
        """The share of the servers' time in which they generated nothing."""
        return max(0.0, 1 - sum(step.engine_busy_s for step in self.steps) / (self.servers * self.seconds))

    @property
    def trainer_idle(self) -> float:
        """The share of the time in which the trainer waited."""
        return sum(step.waiting_s for step in self.steps) / self.seconds

    @property
    def host_busy(self) -> float:
        """The share of the time in which the processes that play rollouts worked."""
        return sum(step.host_s for step in self.steps) / self.seconds

    @property
    def tokens_per_s(self) -> float:
        """Tokens of the groups that steps took; what was dropped does not count."""
        return sum(step.written for step in self.steps) / self.seconds

    @property
    def running(self) -> float:
        """The mean number of sequences that run on a busy server."""
        return sum(step.sequence_s for step in self.steps) / max(1e-12, sum(step.engine_busy_s for step in self.steps))

    @property
    def staleness(self) -> int:
        return max(step.staleness for step in self.steps)

    @property
    def dropped(self) -> int:
        return sum(step.dropped for step in self.steps)


def simulate(
    limits: JobLimits, workload: Workload, cluster: Cluster, *, steps: int = 4, warmup: int = 1, seed: int = 0
) -> Simulation:
    """Simulates some steps after those of the warm-up, in which queues fill. The same seed gives the same steps."""
    return _Simulator(limits, workload, cluster, seed).run(min(steps + warmup, limits.steps), warmup)


@contextmanager
def _paused_garbage_collection() -> Iterator[None]:
    """The simulation makes many objects and no cycles that matter; looking for some took a third of its time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class _Simulator:
    def __init__(self, limits: JobLimits, workload: Workload, cluster: Cluster, seed: int) -> None:
        self.queue, self.limits, self.cluster = EventQueue(), limits, cluster
        self.rollouts = SimulatedRollouts(self.queue, limits, workload, seed, cluster.host_workers)
        self.servers = [
            SimulatedServer(self.queue, cluster.engine, self.rollouts.finish_turn) for _ in range(cluster.servers)
        ]
        self.rollouts.servers = self.servers
        self.version = 0
        self.steps: list[SimulatedStep] = []
        self.totals = (0.0, 0.0, 0.0)

    def run(self, steps: int, warmup: int) -> Simulation:
        self.queue.start(self._train(steps))
        with _paused_garbage_collection():
            self.queue.run()
        measured = tuple(self.steps[warmup:] or self.steps)
        rollouts = self.rollouts
        return Simulation(
            measured, len(self.servers), rollouts.started, rollouts.ended, rollouts.running, rollouts.most_running
        )

    def _train(self, steps: int) -> Process:
        queue, source = self.queue, make_simulated_source(self.queue, self.rollouts, self.limits, lambda: self.version)
        for step in range(1, steps + 1):
            started = queue.now
            batch = yield from source.take(step)
            taken = queue.now
            staleness = batch.staleness(self.version)
            yield self.cluster.trainer.update_s(batch.tokens)
            learned = queue.now
            yield from source.wait_until_idle()
            idle = queue.now
            yield from self._publish(step)
            waited = taken - started + idle - learned
            self._record(
                batch, staleness, (queue.now - started, waited, learned - taken, queue.now - idle, taken - started)
            )
            source.on_published()
        queue.stop()

    def _publish(self, step: int) -> Process:
        """Servers generate nothing while weights arrive."""
        seconds = self.cluster.trainer.publish_s
        for server in self.servers:
            server.stall(seconds)
        yield seconds
        self.version = step
        for server in self.servers:
            server.load(step, read_again=self.limits.reads_again)

    def _record(self, batch: SimulatedBatch, staleness: int, times: tuple[float, float, float, float, float]) -> None:
        for server in self.servers:
            server.advance()
        busy_s = sum(server.busy_s for server in self.servers)
        sequence_s = sum(server.sequence_s for server in self.servers)
        before, self.totals = self.totals, (busy_s, sequence_s, self.rollouts.host_s)
        spent = tuple(now - earlier for now, earlier in zip(self.totals, before, strict=True))
        self.steps.append(
            SimulatedStep(
                *times,
                engine_busy_s=spent[0],
                sequence_s=spent[1],
                host_s=spent[2],
                written=batch.written,
                staleness=staleness,
                dropped=batch.dropped,
                replaced=batch.replaced,
            )
        )
