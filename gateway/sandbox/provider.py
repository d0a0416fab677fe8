"""Sandboxes behind one interface: a provider starts them; a sandbox runs commands and Python, and keeps files.

Every provider starts `command_server.py` inside and talks to it over a pipe, so that one needs to know only how to
start a process. What a provider fails at is `Unavailable`, never the policy's failure.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from gateway.process import child_entry
from gateway.process.reaper import Reaper
from gateway.sandbox import command_server, interpreter_process
from gateway.sandbox import sandbox_statistics as statistics
from gateway.sandbox.bubblewrap import Confined, python_folders
from gateway.sandbox.confined_process import ConfinedProcess, SandboxEnded
from gateway.sandbox.large_messages import (
    PIECE_BYTES,
    decode_base64,
    encode_base64,
    encode_message,
    get_pieces,
    parse_message,
    split_pieces,
)
from gateway.sandbox.sandbox_settings import SandboxSettings
from gateway.sandbox.sandboxed_command import open_command

FILE_S = 30.0
"""Deadline of reading or writing a file."""
MARGIN_S = 5.0
"""How long after its deadline a request may take to be answered: the rest of it is killed meanwhile."""
MOST_IMAGES = interpreter_process.MOST_IMAGES
ENVIRONMENT = {"MPLBACKEND": "Agg", "MPLCONFIGDIR": "/tmp/matplotlib", "PYTHONHASHSEED": "0"}  # noqa: S108 - inside
"""Equal rollouts print equal sets."""
SCRIPTS = (child_entry.__file__, command_server.__file__, interpreter_process.__file__)
"""What runs inside: the first runs the functions of the others."""
SERVER_COMMAND = (sys.executable, "-I", "-S", "-B", SCRIPTS[0], f"{SCRIPTS[1]}:serve")
INTERPRETER_COMMAND = (sys.executable, "-B", "-u", SCRIPTS[0], f"{SCRIPTS[2]}:serve")


@dataclass(frozen=True, slots=True)
class Completed:
    """How a command or a piece of code ended."""

    stdout: str
    stderr: str = ""
    status: int | None = None
    """The exit status of a command that ended by itself."""
    stopped: str = ""
    """Why it was stopped, if it was."""
    images: tuple[bytes, ...] = ()
    """PNG images of the figures that Python code drew."""
    is_lost: bool = False
    """Whether the variables of earlier code are gone."""
    refusals: tuple[str, ...] = ()
    """Connections that the proxy refused meanwhile."""


class Sandbox(Protocol):
    """One started sandbox, used by one rollout. Requests wait for each other."""

    @property
    def alive(self) -> bool: ...

    @property
    def has_ended(self) -> bool:
        """Whether it is known to have ended by itself."""
        ...

    @property
    def python(self) -> str:
        """The Python program inside."""
        ...

    async def run(self, command: Sequence[str], stdin: bytes, timeout_s: float) -> Completed:
        """Runs a command. Raises SandboxEnded, or SandboxKilled if it was ended from outside."""
        ...

    async def run_python(self, code: str, timeout_s: float) -> Completed:
        """Runs code in an interpreter that keeps its variables."""
        ...

    async def put(self, path: str, data: bytes, *, append: bool = False) -> None:
        """Writes a file, or adds to it; raises OSError with a text for the policy."""
        ...

    async def get(self, path: str, max_bytes: int) -> bytes:
        """Reads a file; raises OSError with a text for the policy."""
        ...

    async def get_piece(self, path: str, max_bytes: int, offset: int) -> tuple[bytes, bool]:
        """A part of a file of at most `max_bytes`, and whether that ends it; raises OSError as `get` does."""
        ...

    async def stop(self) -> None: ...


class SandboxProvider(Protocol):
    """Starts sandboxes."""

    mounts_states: bool
    """Whether `start` makes the working folder of a prepared state, which is put in after the start otherwise."""

    async def start(self, settings: SandboxSettings, state: Path | None = None) -> Sandbox:
        """A started sandbox, which the caller stops; raises Unavailable."""
        ...


class BubblewrapProvider:
    """Starts sandboxes on this machine."""

    mounts_states = True

    def __init__(self, reaper: Reaper) -> None:
        self._reaper = reaper

    async def start(self, settings: SandboxSettings, state: Path | None = None) -> LocalSandbox:
        readable = (*python_folders(), *SCRIPTS)
        confined = Confined(
            SERVER_COMMAND, settings, readable, env=ENVIRONMENT, state=str(state or ""), is_first_process=True
        )
        return LocalSandbox(await ConfinedProcess.start(open_command(confined, self._reaper), self._reaper))


class LocalSandbox:
    """A sandbox whose server of commands is a child process of this one, or is reached through one."""

    def __init__(self, process: ConfinedProcess, interpreter: Sequence[str] = INTERPRETER_COMMAND) -> None:
        self._process, self._settings, self._interpreter = process, process.settings, list(interpreter)
        self._memory_hits = 0

    @property
    def alive(self) -> bool:
        return self._process.alive

    @property
    def has_ended(self) -> bool:
        return self._process.process.exit_code is not None

    @property
    def python(self) -> str:
        return self._interpreter[0]

    async def run(self, command: Sequence[str], stdin: bytes, timeout_s: float) -> Completed:
        request = {"do": "run", "command": list(command), "stdin": await encode_base64(stdin)}
        reply = await self._ask(request | self._limits(timeout_s), timeout_s)
        if "error" in reply:
            raise OSError(str(reply["error"]))
        status = reply.get("status")
        return await self._completed(reply, str(reply.get("stderr", "")), status if isinstance(status, int) else None)

    async def run_python(self, code: str, timeout_s: float) -> Completed:
        request = {"do": "python", "code": code, "command": self._interpreter}
        reply = await self._ask(request | self._limits(timeout_s), timeout_s)
        return await self._completed(reply, str(reply.get("error", "")), None)

    async def put(self, path: str, data: bytes, *, append: bool = False) -> None:
        for piece, follows in split_pieces(data, append=append):
            request = {"do": "put", "path": path, "data": await encode_base64(piece), "append": follows}
            reply = await self._ask(request, FILE_S)
            if "error" in reply:
                raise OSError(str(reply["error"]))

    async def get(self, path: str, max_bytes: int) -> bytes:
        return await get_pieces(self.get_piece, path, max_bytes)

    async def get_piece(self, path: str, max_bytes: int, offset: int) -> tuple[bytes, bool]:
        request = {"do": "get", "path": path, "most": max_bytes, "offset": offset, "piece": PIECE_BYTES}
        reply = await self._ask(request, FILE_S)
        if "error" in reply:
            raise OSError(str(reply["error"]))
        return (await self._decode([reply.get("data")]))[0], reply.get("is_end") is not False

    async def stop(self) -> None:
        await self._process.stop()

    def _limits(self, timeout_s: float) -> dict[str, Any]:
        return {"timeout_s": timeout_s, "output_bytes": self._settings.output_bytes}

    async def _completed(self, reply: Mapping[str, Any], stderr: str, status: int | None) -> Completed:
        stopped, hits = str(reply.get("stopped", "")), self._process.group.hits()["memory"]
        if hits > self._memory_hits:
            self._memory_hits = hits
            stopped = f"it used more than {self._settings.memory_mb} MB of memory"
        elif stopped:
            limit = "output" if "printed" in stopped else "time" if "time limit" in stopped else "processes"
            statistics.count_hits({limit: 1})
        most, images = self._settings.output_bytes, await self._decode(reply.get("images", []))
        stdout = str(reply.get("stdout", ""))[:most]
        refusals = self._process.take_refusals()
        return Completed(stdout, stderr[:most], status, stopped, images, reply.get("lost") is True, refusals)

    async def _decode(self, texts: Any) -> tuple[bytes, ...]:
        """Decodes base64."""
        try:
            return tuple([await decode_base64(text) for text in texts[:MOST_IMAGES]])
        except (ValueError, TypeError, KeyError):
            raise await self._unreadable() from None

    async def _unreadable(self) -> SandboxEnded:
        """Ends the sandbox: what runs in it may have answered in place of its server."""
        await self.stop()
        return SandboxEnded("its processes wrote an answer that cannot be read")

    async def _ask(self, request: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        body = await self._process.ask(await encode_message(request), timeout_s + MARGIN_S)
        try:
            reply = await parse_message(body)
        except (ValueError, RecursionError):
            reply = None
        if isinstance(reply, dict):
            return reply
        raise await self._unreadable()


@asynccontextmanager
async def opened(provider: SandboxProvider, settings: SandboxSettings) -> AsyncIterator[Sandbox]:
    """A sandbox for a block."""
    sandbox = await provider.start(settings)
    try:
        yield sandbox
    finally:
        await sandbox.stop()
