"""The rollout workers of a run: hands rollouts to the least busy one, and begins those of a lost one again.

Those of this machine are started, restarted with growing delays, and ended with all that they started.
"""

from __future__ import annotations

import logging
import os
import secrets
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, nullcontext
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

import anyio
from anyio.abc import Listener, SocketAttribute, SocketStream

from gateway.errors import ConfigError, GatewayError
from gateway.process.pipe_process import end_supervised, start_supervised
from gateway.version import installed_version
from mtrl_plugins.workers.line_channel import (
    MIN_TOKEN_LENGTH,
    TOKEN_VARIABLE,
    Address,
    ChannelError,
    LineChannel,
    accept_worker,
)
from mtrl_plugins.workers.settings import WorkerSettings
from mtrl_plugins.workers.worker_job import WorkerJob
from mtrl_plugins.workers.worker_link import OVER, UP, Assignment, RefusedError, WorkerLink, WorkerLostError
from trainer.engine.base import Engine
from trainer.ledger import Ledger
from trainer.rollout.loop import RolloutRunner, Slot
from trainer.rollout.rollout import Rollout, StopReason
from trainer.rollout.task import Task


class WorkersError(GatewayError):
    """No rollout worker can play."""


class LateWorkersError(WorkersError):
    """Rollout workers have not connected in time. Its exit code has launchers start the ranks again."""

    exit_code = 1


def read_worker_token(settings: WorkerSettings) -> str:
    """The token for workers of other machines. Raises ConfigError if it is needed and missing, or short."""
    if settings.listen is None:
        return ""
    token = os.environ.get(TOKEN_VARIABLE, "")
    if len(token) < MIN_TOKEN_LENGTH:
        problem = f"needs a token of at least {MIN_TOKEN_LENGTH} characters in {TOKEN_VARIABLE}"
        remedy = f"export {TOKEN_VARIABLE}=$(openssl rand -hex 24) here and where the workers start"
        raise ConfigError(problem, field="rollout.listen", remedy=remedy)
    return token


FIRST_DELAY_S, LONGEST_DELAY_S = 1.0, 60.0
"""Delays before a worker is restarted: each is twice the one before."""
STEADY_S = 300.0
"""A worker that was up for so long is restarted with the first delay."""
POLL_S = 0.1
GRACE_S = 3.0
"""How long a worker that is no longer needed may take to end."""
MAX_LOG_BYTES = 64 << 20
"""A longer log is begun again when its worker is restarted."""


class LocalWorker:
    """One worker of this machine."""

    def __init__(self, name: str, token: str, log_file: Path, on_end: Callable[[LocalWorker], None]) -> None:
        """`on_end` is called whenever the process has ended, before it is started again."""
        self.name, self.token, self.log_file = name, token, log_file
        self.restarts, self.problem = 0, ""
        self.link: WorkerLink | None = None
        """Its connection, once it has one."""
        self.is_ending = False
        self.delay_s = FIRST_DELAY_S
        """How long it waits before the next start."""
        self._on_end = on_end

    async def keep_running(self, address: Address) -> None:
        """Starts the process, and again whenever it ends, until this is cancelled."""
        while not self.is_ending:
            started = time.monotonic()
            await self._run_once(address)
            if self.is_ending:
                return
            if time.monotonic() - started > STEADY_S:
                self.delay_s = FIRST_DELAY_S
            self._on_end(self)
            await anyio.sleep(self.delay_s)
            self.delay_s = min(2 * self.delay_s, LONGEST_DELAY_S)
            self.restarts += 1

    async def _run_once(self, address: Address) -> None:
        """Runs the process until it ends or its connection is lost."""
        self.link = None
        try:
            log = _open_log(self.log_file)
        except OSError as error:
            self.problem = f"{self.log_file} cannot be written ({error.strerror})"
            return
        with log:
            words = ("-m", "trainer.cli", "worker", "--connect", str(address), "--name", self.name, "--wait", "0")
            environment = {**os.environ, TOKEN_VARIABLE: self.token}
            try:
                process = await start_supervised((sys.executable, *words), env=environment, stdout=log, stderr=log)
            except OSError as error:
                self.problem = f"{sys.executable} cannot be started ({error.strerror})"
                return
        try:
            while process.exit_code is None and not (self.link and self.link.ended.is_set()):  # noqa: ASYNC110
                await anyio.sleep(POLL_S)
        finally:
            has_ended = self.is_ending or (self.link is not None and self.link.has_ended_itself)
            await end_supervised(process, GRACE_S, first_s=GRACE_S if has_ended else 0.0)
        self.problem = self._describe_end(process.exit_code)

    def _describe_end(self, code: int | None) -> str:
        """Why the process ended, as it said itself or as the system says."""
        if self.link is not None and self.link.problem and not self.link.has_ended_itself:
            return self.link.problem
        how = f"killed by signal {-code}" if code is not None and code < 0 else f"exit code {code}"
        return f"{how}; see {self.log_file}"


def _open_log(file: Path) -> BinaryIO:
    file.parent.mkdir(parents=True, exist_ok=True)  # An evaluation's folder is made when its first rollouts are saved.
    is_long = file.exists() and file.stat().st_size > MAX_LOG_BYTES
    return file.open("wb" if is_long else "ab", buffering=0)


MAX_PLAYS = 5
"""How often a rollout is given to a worker, if each is lost before the rollout has acted."""
MAX_STRANGERS = 64
"""Connections to one place that have not proved yet that they know the token."""
MAX_NAME_LENGTH = 80

log = logging.getLogger(__name__)


@dataclass
class _Entrance:
    """A place where workers connect."""

    token: str
    """What they must know."""
    owners: Mapping[str, LocalWorker]
    """Those that may connect, if they are of this machine."""
    strangers: int = 0
    """Connections that have not proved yet that they know the token: others' are no reason to refuse our own."""


class WorkerPool:
    """An async context manager: workers are up inside. `play` has one of them play a rollout."""

    def __init__(  # noqa: PLR0913 - what a run has
        self,
        settings: WorkerSettings,
        job: WorkerJob,
        engine: Engine,
        folder: Path,
        log: Callable[[str], None],
        *,
        is_last: bool = True,
        acts_unseen: bool = False,
    ) -> None:
        """Workers of other machines end with the pool `is_last` of a run, and wait for the next one otherwise.

        `acts_unseen`: rollouts may do things of which workers do not tell: an agent's, a plug-in's, an environment's.
        """
        self.acts_unseen = acts_unseen
        self.settings = settings
        self._is_last, self._is_over = is_last, False
        self._job, self._engine, self._log = job, engine, log
        self._token = read_worker_token(settings)
        self._local_token = secrets.token_urlsafe(24)
        self._locals = {
            name: LocalWorker(name, self._local_token, folder / f"{name}.log", self._on_local_end)
            for name in map("worker-{}".format, range(settings.workers))
        }
        self._links: list[WorkerLink] = []
        self._changed = anyio.Event()
        self._lost_rollouts = self._restarts_reported = 0
        self._stack, self._tasks = AsyncExitStack(), anyio.create_task_group()
        self.address: Address | None = None
        """Where workers of other machines connect."""

    @property
    def alive(self) -> int:
        """Workers that play."""
        return sum(link.state == UP for link in self._links)

    @property
    def restarts(self) -> int:
        """How often workers of this run were started again."""
        return sum(worker.restarts for worker in self._locals.values())

    def wrap(self, runner: RolloutRunner) -> RolloutRunner:
        """A runner like this one, whose rollouts workers play."""
        shared = {field.name: getattr(runner, field.name) for field in fields(RolloutRunner)}
        return WorkerRunner(**shared, pool=self)

    def describe(self) -> str:
        """The state of the workers in words."""
        own = sum(worker.link is not None and worker.link.state == UP for worker in self._locals.values())
        text = f"{own} of {self.settings.workers} up" if self.settings.workers else ""
        text += f"{', ' * bool(text)}{self.alive - own} on other machines" if self.settings.listen else ""
        return text + (f", {self.restarts} restarts" if self.restarts else "")

    def take_metrics(self) -> dict[str, float]:
        """Workers that are up, what was restarted and lost since the last call, and how busy each worker was."""
        metrics = {
            "workers/alive": float(self.alive),
            "workers/restarts": float(self.restarts - self._restarts_reported),
            "workers/lost_rollouts": float(self._lost_rollouts),
        }
        self._restarts_reported, self._lost_rollouts = self.restarts, 0
        for link in self._links:
            metrics |= link.take_metrics()
        return metrics

    async def __aenter__(self) -> Self:
        try:
            await self._stack.enter_async_context(self._tasks)
            self._stack.push_async_callback(self._end_all)
            await self._listen()
            await self._wait_for_first()
        except BaseException:
            self._tasks.cancel_scope.cancel()
            await self._stack.aclose()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        self._is_over = self._is_last and kind is None  # A run that failed may start again, and needs its workers.
        return await self._stack.__aexit__(kind, error, trace)

    async def play(self, assignment: Assignment) -> Rollout:
        """Plays a rollout. One that is lost with its worker begins again with the same seed on another, unless it may
        have acted: then it ends as lost, and the group's rules decide."""
        observer, reason = assignment.runner.observer, ""
        stop = StopReason.WORKER_LOST
        observer.on_state(assignment.key, "pending")
        for _ in range(MAX_PLAYS):
            try:
                link = await self._take_link()
                rollout = await link.play(assignment)
            except WorkerLostError as error:
                self._lost_rollouts += 1
                reason = str(error)
                if error.has_acted:
                    break
            except WorkersError as error:
                reason = str(error)
                break
            except RefusedError as error:
                stop, reason = StopReason.ERROR, str(error)
                break
            else:
                observer.on_end(assignment.key, rollout)
                return rollout
        rollout = make_lost_rollout(assignment, stop, reason)
        observer.on_end(assignment.key, rollout)
        return rollout

    async def _take_link(self) -> WorkerLink:
        """The worker with the fewest rollouts. Raises WorkersError if there is none for too long."""
        with anyio.move_on_after(self.settings.wait_s):
            while True:
                up = [link for link in self._links if link.state == UP]
                if up:
                    return min(up, key=lambda link: link.load)
                await self._changed.wait()
        problems = "; ".join(f"{worker.name}: {worker.problem}" for worker in self._locals.values() if worker.problem)
        raise WorkersError(f"no rollout worker was up for {self.settings.wait_s:g} s; {problems or 'none connected'}")

    async def _listen(self) -> None:
        if self._locals:
            own = await self._serve_on("127.0.0.1", 0, _Entrance(self._local_token, self._locals))
            for worker in self._locals.values():
                self._tasks.start_soon(worker.keep_running, own)
        if self.settings.listen is not None:
            given = Address.parse(self.settings.listen)
            self.address = await self._serve_on(given.host, given.port, _Entrance(self._token, {}))
            self._log(f"workers of other machines connect to {self.address.for_others}")

    async def _serve_on(self, host: str, port: int, entrance: _Entrance) -> Address:
        """Accepts workers that know the token."""
        try:
            listener = await anyio.create_tcp_listener(local_host=host, local_port=port)
        except OSError as error:
            remedy = "name an address of this machine and a free port"
            raise ConfigError(f"cannot be listened on ({error})", field="rollout.listen", remedy=remedy) from error
        self._tasks.start_soon(_serve_listener, listener, partial(self._accept, entrance))
        return Address(host, listener.extra(SocketAttribute.local_port))  # noqa: S610 - no database

    async def _accept(self, entrance: _Entrance, stream: SocketStream) -> None:
        """Serves a connection until it ends."""
        channel = LineChannel(stream)
        try:
            greeting = await self._greet(channel, entrance)
            owner = entrance.owners.get(greeting["name"])
            name = str(greeting["name"])[:MAX_NAME_LENGTH]
            link = WorkerLink(channel, name, self._engine, self._job, self._notify)
            if owner is not None:
                owner.link = link
            await self._serve_link(link, entrance)
        except ChannelError as error:
            log.warning("a connection for rollout workers was refused: %s", error)
        except Exception:  # boundary: one connection never ends the run
            log.exception("a connection for rollout workers failed")
        finally:
            await channel.close()

    async def _greet(self, channel: LineChannel, entrance: _Entrance) -> dict[str, Any]:
        """Checks that a connection is that of a worker, and gives it its job."""
        if entrance.strangers >= MAX_STRANGERS:
            raise ChannelError("too many connect at once")
        entrance.strangers += 1
        try:
            greeting = await accept_worker(channel, entrance.token, installed_version())
            await channel.send_now({"job": self._job.to_plain()})
            return greeting
        finally:
            entrance.strangers -= 1

    async def _serve_link(self, link: WorkerLink, entrance: _Entrance) -> None:
        """Serves a worker while it is connected."""
        self._links.append(link)
        try:
            await link.serve(self.settings.wait_s)
        finally:
            self._links.remove(link)
            self._notify()
        if not entrance.owners and link.problem != OVER:
            self._log(f"the rollout worker {link.name} of another machine is lost: {link.problem}")

    def _on_local_end(self, worker: LocalWorker) -> None:
        problem = worker.problem
        self._log(f"the rollout worker {worker.name} ended: {problem}; it starts again in {worker.delay_s:g} s")
        self._notify()

    def _notify(self) -> None:
        changed, self._changed = self._changed, anyio.Event()
        changed.set()

    async def _wait_for_first(self) -> None:
        """Waits until all workers that this run starts are up, or else one of another machine."""
        with anyio.move_on_after(self.settings.wait_s):
            while self.alive < max(1, self.settings.workers):
                if failed := next((worker for worker in self._locals.values() if worker.problem), None):
                    raise WorkersError(f"the rollout worker {failed.name} cannot start: {failed.problem}")
                await self._changed.wait()
            return
        waited = f"within {self.settings.wait_s:g} s"
        if self.address is not None and not self._locals:
            remedy = f"start `mtrl-train worker --connect {self.address.for_others}` there, or raise `rollout.wait_s`"
            raise LateWorkersError(f"no rollout worker connected {waited}\n  remedy: {remedy}")
        logs = ", ".join(str(worker.log_file) for worker in self._locals.values())
        raise LateWorkersError(f"{self.alive} of {len(self._locals)} rollout workers were up {waited}; see {logs}")

    async def _end_all(self) -> None:
        """Ends all workers, and what serves them. Workers of other machines are only disconnected if the run is not
        over."""
        for worker in self._locals.values():
            worker.is_ending = True
        own = [worker.link for worker in self._locals.values()]
        with anyio.move_on_after(GRACE_S, shield=True):
            async with anyio.create_task_group() as ending:
                for link in self._links:
                    link.problem = OVER
                    if self._is_over or link in own:
                        ending.start_soon(link.end, GRACE_S)
        self._tasks.cancel_scope.cancel()


async def _serve_listener(listener: Listener[SocketStream], handler: Callable[[SocketStream], Awaitable[None]]) -> None:
    async with listener:
        await listener.serve(handler)


def make_lost_rollout(assignment: Assignment, stop: StopReason, reason: str) -> Rollout:
    """A rollout that no worker could play to its end."""
    task = assignment.task
    return Rollout(
        task=task.id,
        kind=task.kind,
        ledger=Ledger(()),
        stop=stop,
        group=assignment.group,
        index=assignment.index,
        reason=reason,
    )


@dataclass(frozen=True)
class WorkerRunner(RolloutRunner):
    """Has workers run rollouts."""

    pool: WorkerPool = field(kw_only=True)

    async def run(
        self, task: Task, *, group: str = "", index: int = 0, attempt: int = 0, slot: Slot | None = None
    ) -> Rollout:
        """Runs one rollout. Failures become stop reasons, not exceptions."""
        assignment = Assignment(self, task, group, index, attempt, slot or nullcontext(), self.pool.acts_unseen)
        return await self.pool.play(assignment)
