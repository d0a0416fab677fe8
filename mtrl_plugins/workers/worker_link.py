"""The training process's side of one worker: its rollouts, their requests to the engine, and its signs of life."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import anyio
from anyio import to_thread
from anyio.abc import TaskGroup

from gateway.errors import format_error
from gateway.types import Outcome
from mtrl_plugins.workers.line_channel import LARGE_BYTES, ChannelError, ConnectionEndedError, LineChannel
from mtrl_plugins.workers.messages import (
    Blobs,
    generation_to_plain,
    request_from_plain,
    sampling_to_plain,
    task_to_plain,
)
from mtrl_plugins.workers.worker_job import WorkerJob
from trainer.engine.base import Engine, EngineError, Generation
from trainer.ledger import Author
from trainer.rollout.loop import RolloutRunner, Slot
from trainer.rollout.rollout import Rollout
from trainer.rollout.steppers import CALLS_INFO, Step
from trainer.rollout.task import Task
from trainer.storage.rollout_line import load_rollout


class WorkerClock:
    """Rollouts are in the worker's hands, or wait for the engine; a worker is idle while it has none in its hands."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now, self._held = now, dict[int, float]()
        self._began = self._idle_since = now()
        self._idle_s = self._turn_s = 0.0
        self._turns = 0

    def hold(self, rollout: int) -> None:
        """A rollout is in the worker's hands."""
        now = self._now()
        if not self._held:
            self._idle_s += now - self._idle_since
        self._held[rollout] = now

    def release(self, rollout: int) -> None:
        """A rollout waits for the engine, or has ended."""
        held_since = self._held.pop(rollout, None)
        if held_since is None:
            return
        now = self._now()
        self._turn_s += now - held_since
        self._turns += 1
        if not self._held:
            self._idle_since = now

    def take_metrics(self, name: str) -> dict[str, float]:
        """The share of time without work, and the mean seconds of a turn, since the last call."""
        now = self._now()
        if not self._held:
            self._idle_s += now - self._idle_since
            self._idle_since = now
        metrics = {f"workers/idle/{name}": self._idle_s / (now - self._began)} if now > self._began else {}
        if self._turns:
            metrics[f"workers/turn_s/{name}"] = self._turn_s / self._turns
        self._began, self._idle_s, self._turn_s, self._turns = now, 0.0, 0.0, 0
        return metrics


LATE_S = 120.0
"""How much longer than `limits.timeout_s` a rollout may take: opening and closing its session has limits of its own."""
MAX_REQUESTS = 64
"""Requests of one rollout to the engine at once."""
STARTING, UP, LOST = "starting", "up", "lost"

OVER = "the run is over"
"""The problem of a worker that was asked to end."""

log = logging.getLogger(__name__)


class WorkerLostError(Exception):
    """The worker is gone, and with it a rollout."""

    def __init__(self, reason: str, *, has_acted: bool) -> None:
        super().__init__(reason)
        self.has_acted = has_acted
        """Whether the rollout called a tool that must not be called twice."""


class RefusedError(Exception):
    """The worker cannot play this rollout, or the task cannot be sent."""


@dataclass(frozen=True, slots=True)
class Assignment:
    """A rollout to play."""

    runner: RolloutRunner
    task: Task
    group: str
    index: int
    attempt: int
    slot: Slot
    acts_unseen: bool = False
    """Whether it may do things of which no message tells, such as an agent's."""

    @property
    def key(self) -> str:
        return f"{self.group}/{self.task.id}/{self.index}" + (f".{self.attempt}" if self.attempt else "")


@dataclass
class _Play:
    """A rollout under way."""

    assignment: Assignment
    blobs: Blobs
    has_acted: bool
    done: anyio.Event = field(default_factory=anyio.Event)
    rollout: Rollout | None = None
    refused: str = ""
    last_generation: Generation | None = None
    generations: dict[int, anyio.CancelScope] = field(default_factory=dict)


class WorkerLink:
    """A connected worker."""

    def __init__(
        self,
        channel: LineChannel,
        name: str,
        engine: Engine,
        job: WorkerJob,
        on_ready: Callable[[], None],
    ) -> None:
        self.name, self.state, self.problem = name, STARTING, ""
        self.ended = anyio.Event()
        self.has_ended_itself = False
        """Whether the connection ended without a word: the process knows why, if it is of this machine."""
        self._on_ready = on_ready
        self._channel, self._engine = channel, engine
        self._silent_s, self._vocabulary = job.silent_s, job.vocabulary
        self._plays: dict[int, _Play] = {}
        self._clock = WorkerClock()
        self._numbers = count()
        self._tasks: TaskGroup

    @property
    def load(self) -> int:
        """Rollouts under way."""
        return len(self._plays)

    def take_metrics(self) -> dict[str, float]:
        """How busy and how fast the worker was since the last call."""
        return self._clock.take_metrics(self.name.replace("/", "_"))

    async def serve(self, start_s: float) -> None:
        """Serves the worker until it is lost; returns then. `problem` says why."""
        try:
            async with anyio.create_task_group() as self._tasks:
                self._tasks.start_soon(self._channel.run_sender)
                self._tasks.start_soon(self._channel.run_beats)
                await self._wait_until_ready(start_s)
                while True:
                    await self._handle(await self._channel.receive(self._silent_s))
        except* ChannelError as errors:
            self.problem = self.problem or str(errors.exceptions[0])
            self.has_ended_itself = isinstance(errors.exceptions[0], ConnectionEndedError)
        except* Exception as errors:  # boundary: one worker never ends the run
            log.exception("the rollout worker %s failed", self.name)
            self.problem = self.problem or f"it could not be served ({format_error(errors.exceptions[0])[:200]})"
        finally:
            self.state = LOST
            self.ended.set()
            for play in self._plays.values():
                play.done.set()

    async def play(self, assignment: Assignment) -> Rollout:
        """Has the worker play a rollout. Raises WorkerLostError or RefusedError."""
        number = next(self._numbers)
        blobs = Blobs(self._channel.send, number)
        play = self._plays[number] = _Play(assignment, blobs, assignment.acts_unseen)
        runner = assignment.runner
        self._clock.hold(number)
        try:
            self._send_assignment(number, assignment, blobs)
            with anyio.move_on_after(runner.limits.timeout_s + LATE_S):
                await play.done.wait()
        finally:
            del self._plays[number]
            self._clock.release(number)
            for scope in play.generations.values():
                scope.cancel()
            if play.rollout is None and self.state != LOST:
                self._channel.send({"t": "cancel", "r": number})
        if play.refused:
            raise RefusedError(play.refused)
        if play.rollout is None:
            problem = self.problem or f"it did not end within {runner.limits.timeout_s + LATE_S:g} s"
            raise WorkerLostError(f"the rollout worker {self.name} is lost: {problem}", has_acted=play.has_acted)
        return play.rollout

    def _send_assignment(self, number: int, assignment: Assignment, blobs: Blobs) -> None:
        """Raises RefusedError for a task that cannot be sent: no other worker would take it either."""
        runner, task = assignment.runner, assignment.task
        try:
            self._channel.send(
                {
                    "t": "play",
                    "r": number,
                    "task": task_to_plain(task, blobs),
                    "group": assignment.group,
                    "index": assignment.index,
                    "attempt": assignment.attempt,
                    "sampling": sampling_to_plain(runner.sampling),
                    "seed": runner.seed,
                }
            )
        except (ValueError, RecursionError) as error:
            problem = f"{task.location or task.id}: the task cannot be sent to a rollout worker: {error}"
            raise RefusedError(problem) from error

    async def end(self, within_s: float) -> None:
        """Tells the worker that the run is over, and waits until it ends."""
        self._channel.send({"t": "end"})
        with anyio.move_on_after(within_s):
            await self.ended.wait()

    async def _wait_until_ready(self, start_s: float) -> None:
        """Waits until the worker has opened its tools and template."""
        try:
            with anyio.fail_after(start_s):
                while (message := await self._channel.receive(start_s)).get("t") != "ready":
                    if message.get("t") == "failed":
                        self.problem = str(message.get("error"))[:2000]
                        raise ChannelError(self.problem)
        except TimeoutError:
            raise ChannelError(f"it was not ready within {start_s:g} s") from None
        self.state = UP
        self._on_ready()

    async def _handle(self, message: dict[str, Any]) -> None:
        """Handles a message; one that is broken costs the worker its connection, and no other worker anything."""
        try:
            if message["t"] == "events":
                for number, *event in message["e"]:
                    if play := self._plays.get(number):
                        _observe(play, *event)
            elif message["t"] == "done":
                await self._receive_rollout(self._plays.get(message["r"]))
            elif message["t"] != "beat" and (play := self._plays.get(message["r"])):
                self._handle_play(play, message)
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise ChannelError(f"it sent a broken message ({format_error(error)[:200]})") from error

    def _handle_play(self, play: _Play, message: Mapping[str, Any]) -> None:
        match message["t"]:
            case "generate":
                content = request_from_plain(message, play.blobs, self._vocabulary)
                self._start_generating(play, message["r"], message["g"], content)
            case "stop":
                if scope := play.generations.get(message["g"]):
                    scope.cancel()
            case "blob":
                play.blobs.receive(message)
            case "acted":
                play.has_acted = True
                self._channel.send({"t": "act", "r": message["r"]})
            case "refused":
                play.refused = str(message["error"])[:2000]
                play.done.set()
            case kind:
                raise ValueError(f"unknown message {kind!r:.40}")

    async def _receive_rollout(self, play: _Play | None) -> None:
        """Reads the line of a finished rollout; one that was cancelled meanwhile is ignored."""
        line = await self._channel.receive_line(self._silent_s)
        if play is None:
            return
        is_large = len(line) > LARGE_BYTES
        rollout = (
            await to_thread.run_sync(load_rollout, line, play.blobs) if is_large else load_rollout(line, play.blobs)
        )
        assignment = play.assignment
        if (rollout.task, rollout.group, rollout.index) != (assignment.task.id, assignment.group, assignment.index):
            raise ValueError(f"it sent the rollout {rollout.name!r:.80}, not {assignment.key!r:.80}")
        play.rollout = rollout
        play.done.set()

    def _start_generating(self, play: _Play, number: int, request: Any, content: tuple[Any, ...]) -> None:
        if type(request) is not int or request in play.generations:
            raise ValueError(f"{request!r:.40} is no number of a new request")
        if len(play.generations) >= MAX_REQUESTS:
            problem = f"the rollout asks for more than {MAX_REQUESTS} turns at once"
            self._channel.send({"t": "generated", "r": number, "g": request, "error": problem, "engine": True})
            return
        play.generations[request] = anyio.CancelScope()
        self._clock.release(number)
        self._tasks.start_soon(self._generate, play, number, request, content)

    async def _generate(self, play: _Play, number: int, request: int, content: tuple[Any, ...]) -> None:
        """Has the engine generate in the rollout's slot, and answers."""
        assignment, (ids, sampling, images) = play.assignment, content
        observer, key = assignment.runner.observer, assignment.key
        answer: dict[str, Any] = {"t": "generated", "r": number, "g": request}
        with play.generations[request]:
            try:
                observer.on_state(key, "pending")
                asked = time.perf_counter()
                async with assignment.slot:
                    queued_s = time.perf_counter() - asked
                    observer.on_state(key, "generating")
                    generation = await self._engine.generate(
                        ids, sampling, key=key, group=assignment.group, images=images
                    )
                play.last_generation = generation
                answer |= generation_to_plain(generation) | {"queued": queued_s}
            except EngineError as error:
                answer |= {"error": str(error), "engine": True}
            except Exception as error:  # boundary: the engine's bug ends this rollout, not the others
                log.exception("rollout %s: the engine failed", key)
                answer |= {"error": format_error(error), "engine": False}
            finally:
                play.generations.pop(request, None)
            self._channel.send(answer)
            if number in self._plays:
                self._clock.hold(number)


def _observe(play: _Play, kind: str, *details: Any) -> None:
    """Passes an event of the worker on to the observer of the rollout."""
    observer, key = play.assignment.runner.observer, play.assignment.key
    if kind == "state":
        (state,) = details
        observer.on_state(key, state)
    elif kind == "generation" and play.last_generation is not None:
        (prompt_tokens,) = details
        observer.on_generation(key, play.last_generation, prompt_tokens)
    elif kind == "step":
        author, outcomes, source, calls, seconds = details
        step = Step(Author(author), outcomes=tuple(map(Outcome, outcomes)), source=source, info={CALLS_INFO: calls})
        observer.on_step(key, step, seconds)
