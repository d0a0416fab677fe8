"""Environments in host processes: starts a process when it is needed, sends requests from any event loop, ends it.

A process that has died or hangs is replaced for later rollouts; those that it had under way are lost, and not scored.
Of environments with a runner of their own, rows and scores are recorded in the folder of the tape, and replayed from
it: rows are read before the tape begins, and scores are asked for once the sessions have ended.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import contextmanager, suppress
from errno import ENOSPC
from hashlib import sha256
from os import strerror
from pathlib import Path
from typing import Any

import anyio
from anyio import to_thread
from anyio.lowlevel import current_token

from gateway.disk_errors import describe_write_error
from gateway.errors import ConfigError, GatewayError
from gateway.line_file import iterate_lines, parse_json_line
from gateway.native.thread_pool import call_soon
from gateway.process import child_entry
from gateway.process.pipe_process import ProcessEnded
from gateway.process.request_process import RequestProcess, RequestRefused
from mtrl_plugins.environments.host_server import EXIT_S as CLOSE_S
from mtrl_plugins.environments.settings import EnvironmentSettings, HostedSettings

STOP_S, EXIT_S = 8.0, 1.0
"""How long a process may take to end once its input is closed: usually, and where it has failed or a step hangs."""
LEFT_OUT = ("PYTHONHOME", "VIRTUAL_ENV")
"""Variables of our own Python, which would mislead another one."""


log = logging.getLogger(__name__)

HOST_TAPE = "environment.jsonl"
"""The file in the tape's folder."""


class HostTape:
    """Records a host's answers: in memory until there is a folder, then in its file."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._file: Path | None = None
        self._has_failed = False
        self._lock = threading.Lock()

    def add_rows(self, page: tuple[str, int, int], rows: Sequence[Any]) -> None:
        """Records rows: a page is its split, its start and its length."""
        self._add({"page": page, "rows": rows})

    def add_scores(self, starts: int, rollouts: Sequence[str], scores: Sequence[Any]) -> None:
        """Records the scores of rollouts, whose names are those of one start of the process."""
        self._add({"starts": starts, "scores": dict(zip(rollouts, scores, strict=True))})

    def start(self, folder: Path) -> None:
        """Writes to the tape's folder from now on. Raises GatewayError if that is impossible."""
        with self._lock:
            self._file = folder / HOST_TAPE
            if problem := self._write():
                raise GatewayError(problem)

    def _add(self, line: Mapping[str, Any]) -> None:
        """A failed write is logged: the tape itself is on the same disk, and the run ends with it."""
        with self._lock:
            if self._has_failed:
                return
            self._lines.append(json.dumps(line) + "\n")
            if problem := self._write():
                log.error("%s", problem)

    def _write(self) -> str:
        """Appends what is not written yet, or says why that is impossible. Then the recording stops: whole lines, or
        none."""
        if self._file is None:
            return ""
        try:
            with self._file.open("ab", buffering=0) as stream:
                whole, text = stream.tell(), "".join(self._lines).encode()
                if stream.write(text) < len(text):
                    stream.truncate(whole)
                    raise OSError(ENOSPC, strerror(ENOSPC), str(self._file))
        except OSError as error:
            self._has_failed = True
            return describe_write_error(self._file, error, "and record again")
        self._lines.clear()
        return ""


SERVER = Path(__file__).with_name("host_server.py")
MAX_STARTS = 4
"""How often a process is started within `START_WINDOW_S`, before the environment is given up."""
START_WINDOW_S = 600.0
TREE_STOP_S = 12.0
"""How long all processes of an environment may take to end."""


class EnvironmentFailed(GatewayError):
    """An environment or its process broke, or took too long: a failure of infrastructure, never a score."""


class EnvironmentHost:
    """One environment in a process of its own."""

    def __init__(self, settings: HostedSettings) -> None:
        self.settings = settings
        self.name = settings.title
        self.starts = 0
        """How often it was started; rollouts of an earlier start are lost."""
        self.start_times: deque[float] = deque(maxlen=MAX_STARTS)
        self.about: Mapping[str, Any] = {}
        """What the process said about the environment when it was loaded."""
        self.tape: HostTape | None = None
        """Where rows and scores are recorded."""
        self._child: RequestProcess | None = None
        self._retired: list[RequestProcess] = []
        """Processes with a step that hangs, which end with their last episode."""
        self._episodes: Counter[RequestProcess] = Counter()
        """How many episodes each process has."""
        self._count = 0
        self._starting = threading.Lock()

    @property
    def pid(self) -> int | None:
        """The process, if it runs."""
        return self._child.pid if self._child is not None and not self._child.has_ended else None

    def start(self) -> RequestProcess:
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

    def _load(self) -> RequestProcess:
        settings = self.settings
        python = settings.python or sys.executable
        try:
            variables = {name: value for name, value in os.environ.items() if name not in LEFT_OUT}
            variables.setdefault("PYTHONHASHSEED", "0")  # The order of a set of texts is the same in each process.
            command = [python, child_entry.__file__, f"{SERVER}:serve", str(settings.adapter)]
            child = RequestProcess(command, alone_s=CLOSE_S, env=variables)
        except OSError as error:
            remedy = "name the Python of the virtual environment that has it, as /path/to/venv/bin/python"
            problem = f"{python!r} cannot be started ({error.strerror})"
            raise ConfigError(problem, field="environment.python", remedy=remedy) from error
        try:
            loading = child.send({"do": "load", "environment": settings.id, "args": settings.load_args()})
            self.about = loading.result(settings.start_s) or {}
        except RequestRefused as error:
            child.stop(EXIT_S)
            raise ConfigError(error.problem, field="environment.name", remedy=error.remedy) from error
        except (ProcessEnded, FutureTimeout) as error:
            child.stop(EXIT_S)
            late = f"did not load within {settings.start_s:g} s; {child.describe_log()}"
            remedy = f"load it by hand with {python}, or raise `environment.start_s`"
            problem = f"{self.name} {late if isinstance(error, FutureTimeout) else error}"
            raise ConfigError(problem, field="environment.name", remedy=remedy) from error
        return child

    def request(self, operation: str, **fields: Any) -> Any:
        """Sends a request and blocks until it is answered."""
        child = self.start()
        try:
            return child.send({"do": operation, **fields}).result(self.settings.timeout_s)
        except (ProcessEnded, RequestRefused, FutureTimeout) as error:
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
        return await self.ask(await self.running(), operation, fields)

    async def running(self) -> RequestProcess:
        """The process, started if necessary."""
        child = self._child
        return child if child is not None and not child.has_ended else await to_thread.run_sync(self.start)

    async def ask(self, child: RequestProcess, operation: str, fields: dict[str, Any]) -> Any:
        """Sends a request to one process and waits for the answer, in any event loop."""
        answered, loop = anyio.Event(), current_token()

        def notify(_: object) -> None:
            with suppress(RuntimeError):  # The event loop has ended meanwhile.
                call_soon(loop, answered.set)

        try:
            future = child.send({"do": operation, **fields}, notify)
            with anyio.fail_after(self.settings.timeout_s):
                await answered.wait()
            return future.result()
        except (ProcessEnded, RequestRefused, TimeoutError) as error:
            raise self._failure(operation, error) from error

    def join(self, child: RequestProcess) -> str:
        """A name for a new episode of a process."""
        self._episodes[child] += 1
        self._count += 1
        return f"episode-{self._count}"

    def leave(self, child: RequestProcess, *, hangs: bool) -> None:
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
            with suppress(ProcessEnded):
                self._child.send({"do": operation, **fields})

    def stop(self) -> None:
        """Ends the process; that it was started counts no more towards the limit."""
        self.start_times.clear()
        children = [*self._retired, *([self._child] if self._child is not None else [])]
        self._child, self._retired = None, []
        for child in children:
            child.stop(STOP_S)

    async def stop_async(self) -> None:
        """Ends the process, also for a task that is cancelled."""
        with anyio.move_on_after(TREE_STOP_S, shield=True):
            await to_thread.run_sync(self.stop)

    def _failure(self, operation: str, error: Exception) -> EnvironmentFailed:
        remedy = getattr(error, "remedy", "")
        problem = f"{self.name}: {operation}: {error}"
        if isinstance(error, ProcessEnded):
            problem = f"{self.name} {error}"
        elif isinstance(error, TimeoutError):
            problem = f"{self.name} did not answer {operation!r} within {self.settings.timeout_s:g} s"
            remedy = "raise `environment.timeout_s`"
        return EnvironmentFailed(f"{problem}\n  remedy: {remedy}" if remedy else problem)


hosts: dict[str, EnvironmentHost] = {}
hosts_lock = threading.Lock()


def host_key(settings: EnvironmentSettings) -> str:
    """A name that two different environments do not share; without the arguments themselves, which may be secret."""
    text = settings.model_dump_json()
    return f"{settings.framework}-{sha256(text.encode()).hexdigest()[:16]}"


def get_host(settings: HostedSettings) -> EnvironmentHost:
    """The host of an environment; all parts of a run share it."""
    with hosts_lock:
        return hosts.setdefault(host_key(settings), EnvironmentHost(settings))


@contextmanager
def replace_host(host: EnvironmentHost) -> Iterator[None]:
    """Takes another host for its environment, such as a tape's, for some time."""
    key = host_key(host.settings)
    with hosts_lock:
        before = hosts.get(key)
        hosts[key] = host
    try:
        yield
    finally:
        with hosts_lock:
            if before is None:
                hosts.pop(key, None)
            else:
                hosts[key] = before


def stop_hosts() -> None:
    """Ends all processes; called as this one ends."""
    with hosts_lock:
        ending = [*hosts.values()]
        hosts.clear()
    for host in ending:
        host.stop()


atexit.register(stop_hosts)


class RecordedHost(EnvironmentHost):
    """Answers from a tape's folder, and starts no process."""

    def __init__(self, settings: HostedSettings, folder: Path) -> None:
        super().__init__(settings)
        self._file = folder / HOST_TAPE
        self._rows: dict[tuple[Any, ...], list[Any]] = {}
        self._scores: dict[tuple[int, str], Any] = {}
        try:
            with self._file.open("rb") as stream:
                for line in iterate_lines(stream):
                    if line.is_complete:  # A run that was killed may leave a part of one.
                        self._read(parse_json_line(line.data))
        except (OSError, ValueError, LookupError, TypeError) as error:
            reason = error.strerror if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
            raise ConfigError(f"cannot be read: {reason}", file=self._file, remedy="record the run again") from error

    def _read(self, line: Mapping[str, Any]) -> None:
        if "page" in line:
            self._rows[tuple(line["page"])] = line["rows"]
        else:
            self._scores |= {(line["starts"], rollout): score for rollout, score in line["scores"].items()}

    def start(self) -> RequestProcess:
        """Refuses to start a process."""
        raise EnvironmentFailed(f"{self.name}: what was not recorded is asked for; record the run again")

    def rows(self, split: str, start: int, count: int) -> list[Any]:
        """The recorded rows."""
        if (page := self._rows.get((split, start, count))) is None:
            raise EnvironmentFailed(f"{self._file}: has no rows of {split!r} from {start} on; record the run again")
        return page

    def score(self, starts: int, rollouts: Sequence[str]) -> list[Any]:
        """The recorded scores; None for rollouts without one."""
        return [self._scores.get((starts, rollout)) for rollout in rollouts]
