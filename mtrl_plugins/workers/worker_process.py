"""A rollout worker: connects to the training process, opens its own tools and template, and plays rollouts for it."""

from __future__ import annotations

import gc
import logging
import os
import random
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeVar, cast

import anyio
from anyio import to_thread
from pydantic import ValidationError

from gateway.errors import ConfigError, GatewayError, Unavailable, format_error, unwrap_error
from gateway.session import AnyGateway, AnySession
from gateway.types import DEFAULT_CONTEXT, Context, Task, ToolCall, ToolResult
from gateway.version import installed_version
from mtrl_plugins.workers.line_channel import (
    ANSWER_S,
    TOKEN_VARIABLE,
    Address,
    ChannelError,
    LineChannel,
    StrangerError,
    greet_trainer,
    require_short,
)
from mtrl_plugins.workers.messages import Blobs, sampling_from_plain, task_from_plain
from mtrl_plugins.workers.remote_engine import EventBuffer, EventObserver, RemoteEngine
from mtrl_plugins.workers.worker_job import TokenizerPrint, WorkerJob
from trainer.rollout.loop import RolloutRunner
from trainer.rollout.rollout import Rollout, Span
from trainer.setup import (
    RECONNECT_S,
    find_down_servers,
    load_template,
    make_gateway,
    make_sampling,
    make_stepper,
    trust_model,
)
from trainer.storage.rollout_line import dump_rollout
from trainer.template import TemplateError

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 10.0
"""Pauses between attempts: each is twice the one before."""

Result = TypeVar("Result")


class AwayError(ConfigError):
    """Another process does not answer, and may come back: the training process, or a gateway or its server."""


async def retry_while_away(
    attempt: Callable[[], Awaitable[Result]], within_s: float, on_away: Callable[[str], None]
) -> Result:
    """The result of `attempt`, which is made again while it raises AwayError, until `within_s` have passed.

    `on_away` is told of the first failure, and of each that has another reason than the one before.
    """
    deadline, pause_s, reported = anyio.current_time() + within_s, FIRST_PAUSE_S, ""
    while True:
        try:
            return await attempt()
        except AwayError as error:
            left_s = deadline - anyio.current_time()
            if left_s <= 0:
                raise
            if error.problem != reported:
                reported = error.problem
                on_away(f"{reported}; it is tried again for up to {left_s:.0f} s")
        await anyio.sleep(min(left_s, pause_s * random.uniform(0.7, 1.0)))  # noqa: S311 - spreads many workers
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


OnAct = Callable[[], Awaitable[None]]


class WatchedGateway:
    """A gateway for one rollout: awaits `on_act` before the first call of a tool that is not declared repeatable."""

    def __init__(self, gateway: AnyGateway, on_act: OnAct) -> None:
        self._gateway, self._on_act = gateway, on_act

    def __getattr__(self, name: str) -> Any:
        return getattr(self._gateway, name)

    @asynccontextmanager
    async def open(self, task: Task = Task()) -> AsyncIterator[AnySession]:  # noqa: B008 - frozen
        async with self._gateway.open(task) as session:
            yield cast(AnySession, _WatchedSession(session, self._on_act))


class _WatchedSession:
    def __init__(self, session: AnySession, on_act: OnAct) -> None:
        self._session, self._on_act = session, on_act
        self._repeatable = frozenset(spec.name for spec in session.specs if spec.hints.repeatable)
        self._has_acted = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    async def call(self, call: ToolCall, context: Context = DEFAULT_CONTEXT) -> ToolResult:
        await self._watch((call,))
        return await self._session.call(call, context)

    async def calls(self, calls: Sequence[ToolCall], context: Context = DEFAULT_CONTEXT) -> list[ToolResult]:
        await self._watch(calls)
        return await self._session.calls(calls, context)

    async def _watch(self, calls: Sequence[ToolCall]) -> None:
        if not self._has_acted and any(call.name not in self._repeatable for call in calls):
            await self._on_act()
            self._has_acted = True


CONNECT_S = 30.0
EVENTS_S = 0.25
"""How often events are sent for the progress display."""
LEAVE_S = 8.0
"""After the training process has gone, how long sessions and servers may take to close before this process ends."""
LARGE_ROLLOUT = 20_000
"""Longer rollouts are encoded in a thread."""
EXPECTED = (GatewayError, TemplateError)
"""Errors whose messages say what to do."""
RESTART_REMEDY = "look at the training process; then start the worker again"

log = logging.getLogger(__name__)


class TrainerLostError(ConfigError):
    """The training process was reached, and is lost."""


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """What a worker has from its command line, not from the training process."""

    address: Address
    name: str
    token: str
    model: Path | None = None
    """The model's folder on this machine, if it is another one."""
    tools: str | None = None
    """The tools of this machine, if they are other ones."""
    wait_s: float = 0.0
    """How long the training process may be away."""


def take_token() -> str:
    """The token of the environment, from which it is removed: neither tools nor agents need it."""
    token = os.environ.pop(TOKEN_VARIABLE, "")
    if not token:
        remedy = f"set {TOKEN_VARIABLE} to the token of the training process"
        raise ConfigError("there is no token", field=TOKEN_VARIABLE, remedy=remedy)
    return token


async def run_worker(options: WorkerOptions, tell: Callable[[str], None]) -> None:
    """Plays rollouts until the training process says that it is over. Raises ConfigError if it cannot, and
    TrainerLostError if the training process is lost after it was reached."""
    channel, job = await retry_while_away(partial(_connect, options), options.wait_s, tell)
    worker = Worker(channel, job, tell)
    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(channel.run_sender)
            tasks.start_soon(channel.run_beats)
            tasks.start_soon(worker.receive_all, tasks.cancel_scope)
            await worker.play_all(options)
    except Exception as error:
        cause = unwrap_error(error)
        if isinstance(cause, ChannelError):
            if worker.leaving is not None:  # All is closed.
                worker.leaving.cancel()
            problem = f"the training process at {options.address} is lost: {cause}"
            raise TrainerLostError(problem, remedy=RESTART_REMEDY) from error
        raise cause from None
    finally:
        await channel.close()


async def _connect(options: WorkerOptions) -> tuple[LineChannel, WorkerJob]:
    """Connects to the training process. Raises AwayError if it cannot be reached, ConfigError if it is another one."""
    address = options.address
    try:
        with anyio.fail_after(CONNECT_S):
            channel = LineChannel(await anyio.connect_tcp(address.host, address.port))
    except (OSError, TimeoutError) as error:
        remedy = "start the training process, with `rollout: {listen: HOST:PORT}` in its run file"
        raise AwayError(f"no training process answers at {address} ({error})", remedy=remedy) from error
    try:
        await greet_trainer(channel, options.token, installed_version(), name=options.name, pid=os.getpid())
        return channel, WorkerJob.model_validate((await channel.receive(ANSWER_S)).get("job"))
    except BaseException as error:
        await channel.close()
        if not isinstance(error, ChannelError | ValidationError):
            raise
        kind = AwayError if not isinstance(error, StrangerError | ValidationError) else ConfigError
        raise kind(f"the training process at {address} is lost: {error}", remedy=RESTART_REMEDY) from error


def _leave_in_time() -> threading.Timer:
    """Ends this process even if a tool or a server does not let go of it."""
    timer = threading.Timer(LEAVE_S, lambda: os._exit(1))
    timer.daemon = True
    timer.start()
    return timer


@asynccontextmanager
async def _open_runner(job: WorkerJob, options: WorkerOptions, engine: RemoteEngine) -> AsyncIterator[RolloutRunner]:
    """What rollouts share: this process's own gateway, template, stepper, and endpoint for agents."""
    settings = job.settings if options.tools is None else job.settings.model_copy(update={"tools": options.tools})
    stepper = make_stepper(settings)
    player = next((player for part in settings.parts if (player := part.make_player(settings))), None)
    async with AsyncExitStack() as stack:
        try:
            gateway = await stack.enter_async_context(make_gateway(settings))
        except Unavailable as error:
            raise AwayError(str(error), remedy="start the gateway, or name other tools with --tools") from error
        if down := find_down_servers(gateway):
            raise AwayError("\n".join(map(str, down)))
        model = options.model or job.model
        trust_model(settings, model)
        template = await to_thread.run_sync(load_template, model, settings.template, gateway.specs)
        if difference := job.tokenizer.find_difference(TokenizerPrint.take(template)):
            problem = f"{model} is not the model of the training process: {difference}"
            raise ConfigError(problem, remedy="copy the model's folder from there, or name such a copy with --model")
        runner = RolloutRunner(
            engine,
            template,
            gateway,
            settings.limits,
            make_sampling(settings),
            stepper,
            seed=settings.seed,
        )
        if player is not None:
            await stack.enter_async_context(player)
            runner = player.wrap(runner)
        yield runner


class Worker:
    """The rollouts of this process."""

    def __init__(self, channel: LineChannel, job: WorkerJob, tell: Callable[[str], None] = log.warning) -> None:
        self.channel, self.job, self.events = channel, job, EventBuffer()
        self.leaving: threading.Timer | None = None
        """Ends the process if closing sessions and servers takes too long."""
        self._tell = tell
        self.playing: dict[int, PlayedRollout] = {}
        self._plays = anyio.create_task_group()
        self._runner: RolloutRunner | None = None

    async def play_all(self, options: WorkerOptions) -> None:
        """Opens what rollouts need, once a gateway or server that is away is back, and plays them until it is
        cancelled."""
        opening = partial(_open_runner, self.job, options, PlayedRollout(self, -1).engine)
        try:
            async with AsyncExitStack() as stack:
                self._runner = await retry_while_away(
                    lambda: stack.enter_async_context(opening()), RECONNECT_S, self._tell
                )
                await stack.enter_async_context(self._plays)
                gc.collect()
                gc.freeze()  # What lives as long as the process is not looked through again and again.
                self.channel.send({"t": "ready"})
                while True:
                    await anyio.sleep(EVENTS_S)
                    self.events.send_to(self.channel)
        except Exception as error:
            cause = unwrap_error(error)
            self.channel.send({"t": "failed", "error": str(cause) if isinstance(cause, EXPECTED) else repr(cause)})
            await self.channel.flush()
            raise

    async def receive_all(self, everything: anyio.CancelScope) -> None:
        """Handles messages until the training process ends, or says that it is over."""
        try:
            while (message := await self.channel.receive(self.job.silent_s))["t"] != "end":
                self.handle(message["t"], message)
        finally:
            self.leaving = _leave_in_time()
        everything.cancel()

    def handle(self, kind: str, message: dict[str, Any]) -> None:
        if kind == "beat":
            return
        number = message["r"]
        if kind == "blob":
            self.playing.setdefault(number, PlayedRollout(self, number)).blobs.receive(message)
        elif kind == "play" and self._runner is not None:
            played = self.playing.setdefault(number, PlayedRollout(self, number))
            self._plays.start_soon(played.play, self._runner, message)
        elif kind == "act" and number in self.playing:
            self.playing[number].may_act.set()
        elif kind == "generated" and number in self.playing:
            self.playing[number].engine.receive(message)
        elif kind == "cancel" and number in self.playing:
            self.playing.pop(number).scope.cancel()

    def finish(self, number: int, message: dict[str, Any], *lines: bytes) -> None:
        """Sends what became of a rollout, unless it was cancelled."""
        if self.playing.pop(number, None) is not None:
            self.events.send_to(self.channel)
            self.channel.send(message, *lines)


class PlayedRollout:
    """One rollout."""

    def __init__(self, worker: Worker, number: int) -> None:
        self._worker, self._number = worker, number
        channel, capabilities = worker.channel, worker.job.engine
        self.blobs = Blobs(channel.send, number)
        self.engine = RemoteEngine(channel, number, self.blobs, capabilities, worker.events)
        self.scope = anyio.CancelScope()
        self.may_act = anyio.Event()
        """Set once the training process knows that this rollout does what must not be done twice."""

    async def play(self, shared: RolloutRunner, message: dict[str, Any]) -> None:
        """Plays the rollout, and sends it as a line of the run format."""
        with self.scope:
            try:
                line = await self._play(shared, message)
            except Exception as error:  # boundary: a task or a rollout that cannot be read or written
                log.exception("rollout %s cannot be played", self._number)
                self._worker.finish(self._number, {"t": "refused", "r": self._number, "error": format_error(error)})
            else:
                self._worker.finish(self._number, {"t": "done", "r": self._number}, line)

    async def _play(self, shared: RolloutRunner, message: dict[str, Any]) -> bytes:
        runner = replace(
            shared,
            engine=self.engine,
            gateway=cast(AnyGateway, WatchedGateway(shared.gateway, self.announce_act)),
            sampling=sampling_from_plain(message["sampling"]),
            seed=message["seed"],
            observer=EventObserver(self._worker.events, self._number),
        )
        task = task_from_plain(message["task"], self.blobs)
        rollout = await runner.run(task, group=message["group"], index=message["index"], attempt=message["attempt"])
        rollout = account_queueing(rollout, next(iter(self.engine.queued_s.values()), ()))
        if sum(map(len, rollout.ledgers)) < LARGE_ROLLOUT:
            return require_short(dump_rollout(rollout, self.blobs))
        later = _LaterBlobs()
        line = await to_thread.run_sync(dump_rollout, rollout, later)
        for data in later.data:
            self.blobs.put(data)
        return require_short(line)

    async def announce_act(self) -> None:
        """Tells the training process that this rollout cannot be begun again, and waits until it knows. It does not
        answer if the connection is cut, or if it gave this worker up and began the rollout elsewhere."""
        if not self.may_act.is_set():
            self._worker.channel.send({"t": "acted", "r": self._number})
            await self.may_act.wait()  # The rollout's own limit bounds it, and the end of the connection.


class _LaterBlobs:
    """Gathers the blobs of a rollout that is encoded in a thread: only the event loop may send them."""

    def __init__(self) -> None:
        self.data: list[bytes] = []

    def put(self, data: bytes) -> str:
        self.data.append(data)
        return sha256(data).hexdigest()

    def get(self, digest: str) -> bytes:
        raise NotImplementedError("blobs are only written here")


def account_queueing(rollout: Rollout, queued_s: Sequence[float]) -> Rollout:
    """Counts as queueing what the training process says, which this process saw as generating."""
    spans: list[Span] = []
    timing, waits = dict(rollout.timing), iter(queued_s)
    for span in rollout.timeline:
        if span.phase == "generating" and spans:
            waited = round(min(next(waits, 0.0), span.duration_s), 6)
            spans[-1] = spans[-1]._replace(duration_s=spans[-1].duration_s + waited)
            timing["queueing"] = timing.get("queueing", 0.0) + waited
            timing["generating"] -= waited
            span = span._replace(start_s=span.start_s + waited, duration_s=span.duration_s - waited)
        spans.append(span)
    return replace(rollout, timing=timing, timeline=tuple(spans))
