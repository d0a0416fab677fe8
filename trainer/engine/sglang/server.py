"""A server that we start is ours to end, with all its processes, however we end; it keeps its address for life."""

from __future__ import annotations

import os
import signal
import socket
import ssl
import subprocess
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import anyio
import httpx2
from anyio import to_thread

from gateway.upstream.reaper import Reaper
from trainer.engine.base import EngineError
from trainer.engine.sglang.environment import environment, python
from trainer.engine.sglang.memory import remedied, short
from trainer.engine.sglang.words import heard, last

LAUNCH = Path(__file__).with_name("launch.py")
HOST = "127.0.0.1"
NOTE_S = 10.0
_POLL_S = 0.2
_HEALTH_S = 25.0
"""It generates a token for an answer, and gives itself 20 seconds."""
_END_S = 3.0
STARTS = 3
"""Times that one which ran before is started, before it is given up."""

Told = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Options:
    """What is not given is as SGLang finds best, or without CUDA as `launch.py` says."""

    context: int | None = None
    """The longest sequence; the model's own."""
    tokens: int | None = None
    """That the cache holds for all sequences together."""
    running: int | None = None
    """Sequences at once; more wait."""
    device: str | None = None
    tokenizer: bool = False
    """Ids go in and out; only images and stop strings need its tokenizer."""
    more: tuple[str, ...] = ()
    """Further options of `sglang.launch_server`, word by word."""
    start_s: float = 600.0
    """Imports alone take a minute on a busy machine."""

    def words(self) -> list[str]:
        named = {
            "--context-length": self.context,
            "--max-total-tokens": self.tokens,
            "--max-running-requests": self.running,
            "--device": self.device,
        }
        words = [word for name, value in named.items() if value is not None for word in (name, str(value))]
        return [*words, *(() if self.tokenizer else ("--skip-tokenizer-init",)), *self.more]


class Server:
    """Entered and left by one task. `told` hears how it starts; what it prints is added to `log`."""

    def __init__(
        self,
        model: Path,
        options: Options = Options(),
        *,
        log: Path,
        told: Told = lambda _: None,
    ) -> None:
        self.model, self.options, self.log, self.told = model, options, log, told
        self.url = ""
        self._address: socket.socket | None = None
        self._reaper = Reaper()
        self._process: subprocess.Popen[bytes] | None = None
        self._heard_from = 0
        """Where in the log the last start begins."""

    async def __aenter__(self) -> Self:
        self._address = _reserved()
        self.url = "http://{}:{}".format(*self._address.getsockname())
        try:
            await self._start()
        except BaseException:
            await self.__aexit__(None, None, None)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with anyio.CancelScope(shield=True):  # every wait within is bounded
            await self._end()
            await self._reaper.stop()
        if self._address is not None:
            self._address.close()

    @property
    def pid(self) -> int | None:
        """Of the process that leads the group of all others."""
        return self._process.pid if self._process else None

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    async def restart(self) -> None:
        """Ends what is left of it and starts it anew, on the model's folder, at the same address."""
        for start in range(1, STARTS + 1):
            with anyio.CancelScope(shield=True):
                await self._end()
            try:
                return await self._start()
            except EngineError:  # It was killed before it was there, or cannot be started at all.
                if start == STARTS or self.short:
                    raise

    def fault(self, what: str) -> EngineError:
        """What happened, with how the process ended and its last words."""
        code = self._process.poll() if self._process else None
        ended = "" if code is None else f": ended by signal {-code}" if code < 0 else f": exited with {code}"
        words = heard(self.log, self._heard_from)
        told = f"SGLang at {self.url} {what}{ended}; its log, {self.log}, ends:\n{last(words)}"
        return EngineError(remedied(told, words))

    @property
    def short(self) -> bool:
        """It said, since it was started, that it has no memory left."""
        return short(heard(self.log, self._heard_from))

    async def _start(self) -> None:
        address = ("--host", HOST, "--port", self.url.rpartition(":")[2])
        # A line of log for each request would make a file of gigabytes.
        quiet = ("--log-level-http", "warning")
        told = ("--model-path", str(self.model), *address, *quiet, "--weight-version", "0")
        command = [str(python()), "-P", str(LAUNCH), *told, *self.options.words()]
        await self._reaper.start()
        self._process = await to_thread.run_sync(self._spawn, command)
        self._reaper.add(self._process.pid)
        await self._healthy()

    def _spawn(self, command: list[str]) -> subprocess.Popen[bytes]:
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            self._heard_from = log.tell()
            return subprocess.Popen(  # noqa: S603 (a Python of the operator's and our own file)
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment(),
                start_new_session=True,
            )

    async def _healthy(self) -> None:
        began, noted = anyio.current_time(), 0.0
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # unused, and reading the trust store takes a tenth of a second
        with anyio.move_on_after(self.options.start_s):
            async with httpx2.AsyncClient(verify=tls, trust_env=False, timeout=_HEALTH_S) as http:
                while not await self._answers(http):
                    if not self.alive:
                        raise self.fault("did not start")
                    taken = anyio.current_time() - began
                    if taken - noted >= NOTE_S:
                        noted = taken
                        self.told(f"SGLang is starting, {taken:.0f} s, log {self.log}")
                    await anyio.sleep(_POLL_S)
            self.told(f"SGLang is there after {anyio.current_time() - began:.0f} s: {self.url}, log {self.log}")
            return
        raise self.fault(f"did not answer within {self.options.start_s:.0f} s")

    async def _answers(self, http: httpx2.AsyncClient) -> bool:
        try:
            return (await http.get(f"{self.url}/health")).is_success
        except httpx2.TransportError:
            return False

    async def _end(self) -> None:
        """The first process dies, the others with it, and the last of them tidies up; what is left is killed."""
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        await _gone(process)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        await _gone(process)
        with suppress(subprocess.TimeoutExpired):
            await to_thread.run_sync(process.wait, _END_S)
        self._reaper.remove(process.pid)


def _reserved() -> socket.socket:
    """A free port, bound but not listened to: nobody else is given it, and a server may still listen there."""
    port = socket.socket()
    port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    port.bind((HOST, 0))
    return port


async def _gone(process: subprocess.Popen[bytes]) -> None:
    """It and all of its group, or that takes too long."""
    with anyio.move_on_after(_END_S):
        while _lives(process):  # noqa: ASYNC110 (a group of processes has no event)
            await anyio.sleep(_POLL_S)


def _lives(process: subprocess.Popen[bytes]) -> bool:
    """Any of its group."""
    process.poll()
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, 0)
        return True
    return False
