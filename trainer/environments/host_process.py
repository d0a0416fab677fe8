"""Environments in host processes: starts a process when it is needed, sends requests from any event loop, ends it.

A process that has died is started again for later rollouts; those that it had under way are lost, and are not scored.
"""

from __future__ import annotations

import atexit
import threading
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

import anyio
from anyio import from_thread, to_thread
from anyio.lowlevel import current_token

from gateway.errors import ConfigError, GatewayError
from trainer.environments.host_child import EXIT_S, ChildEnded, ChildRefused, HostChild
from trainer.environments.settings import EnvironmentSettings

SERVER = Path(__file__).with_name("host_server.py")
MAX_STARTS = 4
"""How often a process is started in a run."""


class EnvironmentFailed(GatewayError):
    """An environment or its process broke, or took too long: a failure of infrastructure, never a score."""


class EnvironmentHost:
    """One environment in a process of its own."""

    def __init__(self, settings: EnvironmentSettings) -> None:
        self.settings = settings
        self.name = f"{settings.framework} environment {settings.environment!r}"
        self.starts = 0
        """How often it was started; rollouts of an earlier start are lost."""
        self._child: HostChild | None = None
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
            if self.starts >= MAX_STARTS:
                end = self._child.describe_log() if self._child else ""
                raise EnvironmentFailed(f"{self.name} ended {MAX_STARTS} times; {end}")
            self.starts += 1
            self._child = self._load()
            return self._child

    def _load(self) -> HostChild:
        settings, place = self.settings, self.settings.framework
        try:
            child = HostChild([settings.python, str(SERVER), str(settings.adapter)])
        except OSError as error:
            remedy = "name the Python of the virtual environment that has it, as /path/to/venv/bin/python"
            problem = f"{settings.python!r} cannot be started ({error.strerror})"
            raise ConfigError(problem, field=f"{place}.python", remedy=remedy) from error
        try:
            child.send("load", {"environment": settings.environment, "args": settings.args}).result(settings.start_s)
        except ChildRefused as error:
            child.stop(EXIT_S)
            raise ConfigError(error.problem, field=f"{place}.environment", remedy=error.remedy) from error
        except (ChildEnded, FutureTimeout) as error:
            child.stop(EXIT_S)
            late = f"did not load within {settings.start_s:g} s; {child.describe_log()}"
            remedy = f"load it by hand with {settings.python}, or raise `{place}.start_s`"
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

    async def request_async(self, operation: str, **fields: Any) -> Any:
        """Sends a request and waits for the answer, in any event loop."""
        child = self._child if self.pid is not None and self._child else await to_thread.run_sync(self.start)
        answered, token = anyio.Event(), current_token()

        def notify(_: object) -> None:
            with suppress(RuntimeError):  # The event loop has ended meanwhile.
                from_thread.run_sync(answered.set, token=token)

        try:
            future = child.send(operation, fields, notify)
            with anyio.fail_after(self.settings.timeout_s):
                await answered.wait()
            return future.result()
        except (ChildEnded, ChildRefused, TimeoutError) as error:
            raise self._failure(operation, error) from error

    def tell(self, operation: str, **fields: Any) -> None:
        """Sends a request whose answer does not matter, if the process runs."""
        if self._child is not None:
            with suppress(ChildEnded):
                self._child.send(operation, fields)

    def stop(self) -> None:
        """Ends the process."""
        child, self._child = self._child, None
        if child is not None:
            child.stop()

    def _failure(self, operation: str, error: Exception) -> EnvironmentFailed:
        remedy = getattr(error, "remedy", "")
        problem = f"{self.name}: {operation}: {error}"
        if isinstance(error, ChildEnded):
            problem = f"{self.name} {error}"
        elif isinstance(error, TimeoutError):
            problem = f"{self.name} did not answer {operation!r} within {self.settings.timeout_s:g} s"
            remedy = f"raise `{self.settings.framework}.timeout_s`"
        return EnvironmentFailed(f"{problem}\n  remedy: {remedy}" if remedy else problem)


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


def stop_hosts() -> None:
    """Ends all processes; called as this one ends."""
    with _hosts_lock:
        hosts = [*_hosts.values()]
        _hosts.clear()
    for host in hosts:
        host.stop()


atexit.register(stop_hosts)
