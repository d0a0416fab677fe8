"""Environments in host processes: starts a process when it is needed, sends requests from any event loop, ends it.

A process that has died or hangs is replaced for later rollouts; those that it had under way are lost, and not scored.
"""

from __future__ import annotations

import atexit
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

import anyio
from anyio import to_thread
from anyio.lowlevel import current_token

from gateway.errors import ConfigError, GatewayError
from gateway.native.thread_pool import call_soon
from mtrl_plugins.environments.host_child import EXIT_S, ChildEnded, ChildRefused, HostChild
from mtrl_plugins.environments.host_tape import HostTape
from mtrl_plugins.environments.interpreters import require_interpreter
from mtrl_plugins.environments.settings import EnvironmentSettings

log = logging.getLogger(__name__)

SERVER = Path(__file__).with_name("host_server.py")
MAX_STARTS = 4
"""How often a process is started within `START_WINDOW_S`, before the environment is given up."""
START_WINDOW_S = 600.0
STOP_S = 12.0


class EnvironmentFailed(GatewayError):
    """An environment or its process broke, or took too long: a failure of infrastructure, never a score."""


class EnvironmentHost:
    """One environment in a process of its own."""

    def __init__(self, settings: EnvironmentSettings) -> None:
        self.settings = settings
        self.name = settings.name
        self.starts = 0
        """How often it was started; rollouts of an earlier start are lost."""
        self.start_times: deque[float] = deque(maxlen=MAX_STARTS)
        self.about: Mapping[str, Any] = {}
        """What the process said about the environment when it was loaded."""
        self.tape: HostTape | None = None
        """Where rows and scores are recorded."""
        self._child: HostChild | None = None
        self._retired: list[HostChild] = []
        """Processes with a step that hangs, which end with their last episode."""
        self._episodes: Counter[HostChild] = Counter()
        """How many episodes each process has."""
        self._count = 0
        self._starting = threading.Lock()

    @property
    def pid(self) -> int | None:
        """The process, if it runs."""
        return self._child.pid if self._child is not None and not self._child.has_ended else None

    def start(self) -> HostChild:
        """Starts the process and loads the environment, unless it runs. Raises ConfigError if that is impossible."""
        with self._starting:
            if self._child is not None and not self._child.has_ended:
                return self._child
            if len(self.start_times) == MAX_STARTS and time.monotonic() - self.start_times[0] < START_WINDOW_S:
                end = self._child.describe_log() if self._child else "a step hung each time"
                raise EnvironmentFailed(f"{self.name} ended {MAX_STARTS} times within {START_WINDOW_S:g} s; {end}")
            self.starts += 1
            self.start_times.append(time.monotonic())
            self._child = self._load()
            return self._child

    def _load(self) -> HostChild:
        settings, place = self.settings, self.settings.framework
        python = settings.python or str(require_interpreter(place))
        try:
            child = HostChild([python, str(SERVER), str(settings.adapter)])
        except OSError as error:
            remedy = "name the Python of the virtual environment that has it, as /path/to/venv/bin/python"
            problem = f"{python!r} cannot be started ({error.strerror})"
            raise ConfigError(problem, field=f"{place}.python", remedy=remedy) from error
        try:
            loading = child.send("load", {"environment": settings.environment, "args": settings.load_args()})
            self.about = loading.result(settings.start_s) or {}
        except ChildRefused as error:
            child.stop(EXIT_S)
            raise ConfigError(error.problem, field=f"{place}.environment", remedy=error.remedy) from error
        except (ChildEnded, FutureTimeout) as error:
            child.stop(EXIT_S)
            late = f"did not load within {settings.start_s:g} s; {child.describe_log()}"
            remedy = f"load it by hand with {python}, or raise `{place}.start_s`"
            problem = f"{self.name} {late if isinstance(error, FutureTimeout) else error}"
            raise ConfigError(problem, field=f"{place}.environment", remedy=remedy) from error
        return child

    def request(self, operation: str, **fields: Any) -> Any:
        """Sends a request and blocks until it is answered."""
        child = self.start()
        try:
            return child.send(operation, fields).result(self.settings.timeout_s)
        except (ChildEnded, ChildRefused, FutureTimeout) as error:
            raise self._failure(operation, error) from error

    def rows(self, split: str, start: int, count: int) -> list[Any]:
        """Some rows of the environment's data."""
        rows: list[Any] = self.request("rows", split=split, start=start, count=count)
        if self.tape is not None:
            self.tape.add_rows((split, start, count), rows)
        return rows

    def score(self, starts: int, rollouts: Sequence[str]) -> list[Any]:
        """The scores of a group's rollouts; None for each if the process that played them has ended since."""
        if starts != self.starts:
            log.warning("rollouts are not scored: the process of their environment has ended since")
            return [None] * len(rollouts)
        scores: list[Any] = self.request("score", rollouts=[*rollouts])
        if self.tape is not None:
            self.tape.add_scores(starts, rollouts, scores)
        return scores

    async def request_async(self, operation: str, **fields: Any) -> Any:
        """Sends a request and waits for the answer, in any event loop."""
        return await self.ask(await self._running(), operation, fields)

    async def _running(self) -> HostChild:
        """The process, started if necessary."""
        child = self._child
        return child if child is not None and not child.has_ended else await to_thread.run_sync(self.start)

    async def ask(self, child: HostChild, operation: str, fields: dict[str, Any]) -> Any:
        """Sends a request to one process and waits for the answer, in any event loop."""
        answered, loop = anyio.Event(), current_token()

        def notify(_: object) -> None:
            with suppress(RuntimeError):  # The event loop has ended meanwhile.
                call_soon(loop, answered.set)

        try:
            future = child.send(operation, fields, notify)
            with anyio.fail_after(self.settings.timeout_s):
                await answered.wait()
            return future.result()
        except (ChildEnded, ChildRefused, TimeoutError) as error:
            raise self._failure(operation, error) from error

    async def open_episode(self, seed: int, options: Mapping[str, Any]) -> tuple[HostEpisode, Any]:
        """Opens an episode, which stays with the process that has it; and the environment's first answer."""
        episode = HostEpisode(self, await self._running())
        try:
            return episode, await episode.ask("open", seed=seed, options=dict(options))
        except BaseException:
            episode.close()
            raise

    def join(self, child: HostChild) -> str:
        """A name for a new episode of a process."""
        self._episodes[child] += 1
        self._count += 1
        return f"episode-{self._count}"

    def leave(self, child: HostChild, *, hangs: bool) -> None:
        """An episode of a process has ended. One that hangs gets no more episodes, and is killed with its last one."""
        self._episodes[child] -= 1
        if hangs and child is self._child:
            self._child = None
            self._retired.append(child)
        if not self._episodes[child]:
            del self._episodes[child]
            if child in self._retired:
                self._retired.remove(child)
                threading.Thread(target=child.stop, args=(EXIT_S,), daemon=True).start()

    def tell(self, operation: str, **fields: Any) -> None:
        """Sends a request whose answer does not matter, if the process runs."""
        if self._child is not None:
            with suppress(ChildEnded):
                self._child.send(operation, fields)

    def stop(self) -> None:
        """Ends the process; that it was started counts no more towards the limit."""
        self.start_times.clear()
        children = [*self._retired, *([self._child] if self._child is not None else [])]
        self._child, self._retired = None, []
        for child in children:
            child.stop()

    async def stop_async(self) -> None:
        """Ends the process, also for a task that is cancelled."""
        with anyio.move_on_after(STOP_S, shield=True):
            await to_thread.run_sync(self.stop)

    def _failure(self, operation: str, error: Exception) -> EnvironmentFailed:
        remedy = getattr(error, "remedy", "")
        problem = f"{self.name}: {operation}: {error}"
        if isinstance(error, ChildEnded):
            problem = f"{self.name} {error}"
        elif isinstance(error, TimeoutError):
            problem = f"{self.name} did not answer {operation!r} within {self.settings.timeout_s:g} s"
            remedy = f"raise `{self.settings.framework}.timeout_s`"
        return EnvironmentFailed(f"{problem}\n  remedy: {remedy}" if remedy else problem)


class HostEpisode:
    """An episode in one process, under a name that it has there."""

    def __init__(self, host: EnvironmentHost, child: HostChild) -> None:
        self._host, self._child, self._name = host, child, host.join(child)
        self._hangs = False

    async def ask(self, operation: str, **fields: Any) -> Any:
        """Sends a request. Raises EnvironmentFailed if the environment broke or took too long."""
        try:
            return await self._host.ask(self._child, operation, {"episode": self._name, **fields})
        except EnvironmentFailed as error:
            self._hangs = isinstance(error.__cause__, TimeoutError)
            raise

    def close(self) -> None:
        """Ends the episode, without waiting for the environment."""
        with suppress(ChildEnded):
            self._child.send("close", {"episode": self._name})
        self._host.leave(self._child, hangs=self._hangs)


_hosts: dict[str, EnvironmentHost] = {}
_hosts_lock = threading.Lock()


def find_host(key: str) -> EnvironmentHost | None:
    """The host with this key, if there is one."""
    return _hosts.get(key)


def host_key(settings: EnvironmentSettings) -> str:
    """A name that two different environments do not share; without the arguments themselves, which may be secret."""
    text = f"{settings.framework}:{settings.model_dump_json()}"
    return f"{settings.framework}-{sha256(text.encode()).hexdigest()[:16]}"


def get_host(settings: EnvironmentSettings) -> EnvironmentHost:
    """The host of an environment; all parts of a run share it."""
    with _hosts_lock:
        return _hosts.setdefault(host_key(settings), EnvironmentHost(settings))


@contextmanager
def replace_host(host: EnvironmentHost) -> Iterator[None]:
    """Takes another host for its environment, such as a tape's, for some time."""
    key = host_key(host.settings)
    with _hosts_lock:
        before = _hosts.get(key)
        _hosts[key] = host
    try:
        yield
    finally:
        with _hosts_lock:
            if before is None:
                _hosts.pop(key, None)
            else:
                _hosts[key] = before


def stop_hosts() -> None:
    """Ends all processes; called as this one ends."""
    with _hosts_lock:
        hosts = [*_hosts.values()]
        _hosts.clear()
    for host in hosts:
        host.stop()


atexit.register(stop_hosts)
