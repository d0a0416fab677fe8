"""Starts, restarts and ends an SGLang server process; finds its Python, its log tail, and out-of-memory errors.

SGLang has an environment of its own, since its pinned packages conflict with ours. The server keeps its address for
life, and all of its processes end with the trainer.
"""

from __future__ import annotations

import os
import re
import socket
import ssl
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from subprocess import STDOUT
from typing import Self

import anyio
import httpx2

from gateway.process.log_tail import read_tail
from gateway.process.pipe_process import end_supervised, start_supervised
from gateway.process.supervised_process import SupervisedProcess
from trainer.engine.base import EngineError

PYTHON_VARIABLE = "MTRL_SGLANG_PYTHON"
DEFAULT_PYTHON = ".sglang/bin/python"
"""Made by `make sglang`, in the working directory or in the source folder."""
RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
REMOVED_VARIABLES = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", *RANK_VARIABLES, "MTRL_WORKER_TOKEN")
"""These would lead SGLang's Python to our packages, or its processes to our ranks; the token is for workers alone."""
VISION_CACHE_VARIABLE = "SGLANG_VLM_CACHE_SIZE_MB"
"""Size of SGLang's cache of vision encoder outputs, which is keyed by image alone and survives weight updates."""
DEFAULT_ENVIRONMENT: Mapping[str, str] = {VISION_CACHE_VARIABLE: "0"}


def find_python() -> Path:
    """SGLang's Python: the one named by the variable, else that of `make sglang`, else this one if it has SGLang."""
    if path := os.environ.get(PYTHON_VARIABLE):
        if os.access(path, os.X_OK):
            return Path(path)
        raise EngineError(
            f"{PYTHON_VARIABLE} is {path!r}, which cannot be executed: name the Python that SGLang is installed for"
        )
    installed = next(
        (folder / DEFAULT_PYTHON for folder in _search_folders() if os.access(folder / DEFAULT_PYTHON, os.X_OK)), None
    )
    if installed is not None:
        return installed
    if find_spec("sglang"):
        return Path(sys.executable)
    searched = " and ".join(str(folder / DEFAULT_PYTHON) for folder in _search_folders())
    raise EngineError(
        f"no SGLang here (searched {searched}): run `make sglang`, or set {PYTHON_VARIABLE} to its Python"
    )


def server_environment() -> Mapping[str, str]:
    """The server's environment. Variables that the user sets win."""
    inherited = {
        name: value
        for name, value in os.environ.items()
        if name not in REMOVED_VARIABLES and not name.startswith("TORCHELASTIC_")
    }
    return {**DEFAULT_ENVIRONMENT, **inherited}


def _search_folders() -> tuple[Path, ...]:
    return tuple(dict.fromkeys((Path.cwd(), Path(__file__).parents[3])))


LOG_TAIL_BYTES = 65536
LOG_LINES = 20
_ERROR = re.compile(r"^(?:\w+\.)*\w*(?:Error|Exception)\b.*", re.M)
_NOISE = re.compile(r"^(?:nanobind: | - leaked | - \.\.\. skipped ).*\n?", re.M)
"""A library reports what each ending process has not freed, which is always the same."""


def read_log_tail(log: Path, since: int) -> str:
    """The last bytes of the log, from the offset `since` on."""
    try:
        with log.open("rb") as file:
            return read_tail(file.fileno(), LOG_TAIL_BYTES, since)
    except OSError as error:
        return f"(cannot be read: {error})"


def format_log_tail(text: str) -> str:
    """The last lines, preceded by the last error if that is further up."""
    lines = _NOISE.sub("", text).splitlines()[-LOG_LINES:]
    errors = [error for error in _ERROR.findall(text) if "CancelledError" not in error]  # A consequence, not the cause.
    if errors and errors[-1] not in lines:
        lines = [errors[-1], "...", *lines[-LOG_LINES // 2 :]]
    return "\n".join(lines) or "(nothing)"


_OUT_OF_MEMORY = re.compile(
    r"out of memory|MemoryError|can't allocate memory|not enough memory|bad_alloc|cudaErrorMemoryAlloc", re.I
)
MEMORY_REMEDY = (
    "it ran out of memory; give it less cache (`serving: {options: [--mem-fraction-static, '0.7']}`, on a CPU"
    " `--max-total-tokens`), or fewer requests at once (`admission: {running_requests: 32}`)"
)


def is_out_of_memory(text: str) -> bool:
    """Whether a log or message reports a lack of memory."""
    return _OUT_OF_MEMORY.search(text) is not None


def with_memory_remedy(message: str, log_tail: str = "") -> str:
    """The message, with a remedy if the log or the message is about memory."""
    return f"{message}\n  remedy: {MEMORY_REMEDY}" if is_out_of_memory(log_tail or message) else message


LAUNCH = Path(__file__).with_name("launch.py")
HOST = "127.0.0.1"
PROGRESS_EVERY_S = 10.0
_POLL_S = 0.2
_HEALTH_TIMEOUT_S = 25.0
"""The health endpoint generates one token and gives itself 20 seconds."""
MAX_STARTS = 3
"""Attempts to restart a server that ran before."""

Notify = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """Options of an SGLang server; those left out are SGLang's own, or without CUDA those of `launch.py`."""

    context: int | None = None
    """The longest sequence; by default the model's."""
    cache_tokens: int | None = None
    """Tokens in the KV cache."""
    max_running: int | None = None
    """Sequences at the same time; more of them queue."""
    device: str | None = None
    tokenizer: bool = False
    """Needed for images and stop strings only, since requests and answers are ids."""
    extra: tuple[str, ...] = ()
    """Further options of `sglang.launch_server`."""
    start_s: float = 600.0
    """Imports alone take a minute on a busy machine."""

    def to_args(self) -> list[str]:
        """The command-line arguments."""
        named = {
            "--context-length": self.context,
            "--max-total-tokens": self.cache_tokens,
            "--max-running-requests": self.max_running,
            "--device": self.device,
        }
        args = [word for name, value in named.items() if value is not None for word in (name, str(value))]
        return [*args, *(() if self.tokenizer else ("--skip-tokenizer-init",)), *self.extra]


class ServerProcess:
    """Started and stopped by one task. `notify` gets progress messages; the server's output is appended to `log`."""

    def __init__(
        self, model: Path, options: ServerOptions = ServerOptions(), *, log: Path, notify: Notify = lambda _: None
    ) -> None:
        self.model, self.options, self.log, self.notify = model, options, log, notify
        self.url = ""
        self._address: socket.socket | None = None
        self._process: SupervisedProcess | None = None
        self._log_start = 0
        """Offset in the log at which the last start begins."""

    async def __aenter__(self) -> Self:
        self._address = _reserve_port()
        self.url = "http://{}:{}".format(*self._address.getsockname())
        try:
            await self._start()
        except BaseException:
            await self.__aexit__(None, None, None)
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        with anyio.CancelScope(shield=True):  # every wait within is bounded
            await self._stop()
        if self._address is not None:
            self._address.close()

    @property
    def pid(self) -> int | None:
        """The process id of the leader of the server's process group."""
        return self._process.pid if self._process else None

    @property
    def alive(self) -> bool:
        """Whether the leading process runs."""
        return self._process is not None and self._process.exit_code is None

    async def restart(self) -> None:
        """Ends what is left of the process and starts it again with the model's folder, at the same address."""
        for start in range(1, MAX_STARTS + 1):
            with anyio.CancelScope(shield=True):
                await self._stop()
            try:
                return await self._start()
            except EngineError:  # It was killed while it started, or cannot start at all.
                if start == MAX_STARTS or self.is_out_of_memory:
                    raise

    def error(self, problem: str) -> EngineError:
        """An error with the exit status and the log tail."""
        code = self._process.exit_code if self._process else None
        ended = "" if code is None else f": ended by signal {-code}" if code < 0 else f": exited with {code}"
        log_tail = read_log_tail(self.log, self._log_start)
        message = f"SGLang at {self.url} {problem}{ended}; its log, {self.log}, ends:\n{format_log_tail(log_tail)}"
        return EngineError(with_memory_remedy(message, log_tail))

    @property
    def is_out_of_memory(self) -> bool:
        """Whether its log reports that it ran out of memory since the last start."""
        return is_out_of_memory(read_log_tail(self.log, self._log_start))

    async def _start(self) -> None:
        address = ("--host", HOST, "--port", self.url.rpartition(":")[2])
        # A line of log for each request would make a file of gigabytes.
        quiet = ("--log-level-http", "warning")
        flags = ("--model-path", str(self.model), *address, *quiet, "--weight-version", "0")
        command = [str(find_python()), "-P", str(LAUNCH), *flags, *self.options.to_args()]
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            self._log_start = log.tell()
            self._process = await start_supervised(command, stdout=log, stderr=STDOUT, env=server_environment())
        await self._wait_until_healthy()

    async def _wait_until_healthy(self) -> None:
        began, noted = anyio.current_time(), 0.0
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # unused, and reading the trust store takes a tenth of a second
        with anyio.move_on_after(self.options.start_s):
            async with httpx2.AsyncClient(verify=tls, trust_env=False, timeout=_HEALTH_TIMEOUT_S) as http:
                while not await self._is_healthy(http):
                    if not self.alive:
                        raise self.error("did not start")
                    taken = anyio.current_time() - began
                    if taken - noted >= PROGRESS_EVERY_S:
                        noted = taken
                        self.notify(f"SGLang is starting, {taken:.0f} s, log {self.log}")
                    await anyio.sleep(_POLL_S)
            self.notify(f"SGLang is ready after {anyio.current_time() - began:.0f} s: {self.url}, log {self.log}")
            return
        raise self.error(f"did not answer within {self.options.start_s:.0f} s")

    async def _is_healthy(self, http: httpx2.AsyncClient) -> bool:
        try:
            return (await http.get(f"{self.url}/health")).is_success
        except httpx2.TransportError:
            return False

    async def _stop(self) -> None:
        """Ends the server with all that it started, and waits a bounded time."""
        process, self._process = self._process, None
        if process is not None:
            await end_supervised(process, 0.0)


def _reserve_port() -> socket.socket:
    """A bound socket that does not listen: it keeps the port free for the server."""
    port = socket.socket()
    port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    port.bind((HOST, 0))
    return port
