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
from types import MappingProxyType
from typing import Any, Protocol

from anyio import to_thread

from gateway.errors import ConfigError, Unavailable
from gateway.process import child_entry
from gateway.process.reaper import Reaper
from gateway.sandbox import command_server, host_proxy, interpreter_process, root_interpreter
from gateway.sandbox import sandbox_statistics as statistics
from gateway.sandbox.bubblewrap import Confined, python_folders
from gateway.sandbox.confined_process import START_S, ConfinedProcess, SandboxEnded, SandboxKilled
from gateway.sandbox.kept_files import KeptFiles
from gateway.sandbox.large_messages import (
    PIECE_BYTES,
    decode_base64,
    encode_base64,
    encode_message,
    get_pieces,
    parse_message,
    split_pieces,
)
from gateway.sandbox.roots import find_root
from gateway.sandbox.sandbox_settings import SandboxSettings
from gateway.sandbox.sandboxed_command import open_command
from gateway.types import EMPTY

FILE_S = 30.0
"""Deadline of reading or writing a file."""
MARGIN_S = 5.0
"""How long after its deadline a request may take to be answered: the rest of it is killed meanwhile."""
MOST_IMAGES = interpreter_process.MOST_IMAGES
ENVIRONMENT = {"MPLBACKEND": "Agg", "MPLCONFIGDIR": "/tmp/matplotlib", "PYTHONHASHSEED": "0"}  # noqa: S108 - inside
"""Equal rollouts print equal sets."""
ROOT_HOME = "/root"
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
    def python(self) -> Sequence[str]:
        """The command of a Python inside."""
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

    async def end(self) -> None:
        """Ends all processes. Files that it keeps can still be frozen."""
        ...

    async def stop(self) -> None:
        """Ends all processes and drops the files."""
        ...

    async def freeze(self) -> FrozenFiles:
        """Ends all processes and keeps the files, which the caller closes; raises SandboxEnded or SandboxKilled where
        they are lost, and Unavailable."""
        ...


class FrozenFiles(Protocol):
    """The files that a sandbox has left. Sandboxes that start with them change nothing of them."""

    async def close(self) -> None:
        """Drops them, once no sandbox that started with them runs, and their files were dropped."""
        ...


class SandboxProvider(Protocol):
    """Starts sandboxes."""

    mounts_states: bool
    """Whether `start` makes the working folder of a prepared state, which is put in after the start otherwise."""

    async def start(
        self,
        settings: SandboxSettings,
        state: Path | None = None,
        *,
        keeps_files: bool = False,
        files_of: FrozenFiles | None = None,
    ) -> Sandbox:
        """A started sandbox, which the caller stops; raises Unavailable. One that `keeps_files` can be frozen; with
        `files_of` it has the files that another one with the same root and state left."""
        ...


class BubblewrapProvider:
    """Starts sandboxes on this machine."""

    mounts_states = True

    def __init__(self, reaper: Reaper) -> None:
        self._reaper = reaper

    async def start(
        self,
        settings: SandboxSettings,
        state: Path | None = None,
        *,
        keeps_files: bool = False,
        files_of: FrozenFiles | None = None,
        readable: Sequence[str] = (),
        sockets: Mapping[int, str] = MappingProxyType({}),
    ) -> LocalSandbox:
        root = ""
        env: dict[str, str] = {}
        if settings.root:
            root, settings, env = await to_thread.run_sync(use_root, settings)
        kept = earlier = files_of.kept if isinstance(files_of, FrozenNamespace) else None
        if root or keeps_files or earlier:
            kept = KeptFiles(earlier)
        try:
            needed = () if root else (*python_folders(), *SCRIPTS)
            words = root_interpreter.SERVER_COMMAND if root else SERVER_COMMAND
            confined = Confined(
                words,
                settings,
                (*needed, *readable),
                env=ENVIRONMENT,
                state=str(state or ""),
                root=root,
                kept=kept,
                sockets=sockets,
                reserves_memory=bool(sockets),
                is_first_process=True,
            )
            process = await ConfinedProcess.start(open_command(confined, self._reaper), self._reaper)
            interpreter = root_interpreter.INTERPRETER_COMMAND if root else INTERPRETER_COMMAND
            started = LocalSandbox(process, interpreter, kept)
            try:
                if kept is not None:
                    kept.hold(process.process.pid)
                if env:
                    await started.set_environment(env)
            except BaseException:
                await started.stop()
                raise
        except BaseException as error:
            if kept is not None:
                kept.close()
            if isinstance(error, SandboxEnded | SandboxKilled | OSError):
                raise Unavailable(f"a sandbox did not start: {error}") from error
            raise
        return started


def use_root(settings: SandboxSettings) -> tuple[str, SandboxSettings, dict[str, str]]:
    """The files of a root, the settings that follow from it, and the environment inside; raises Unavailable."""
    try:
        root = find_root(settings.root)
        image = root.image
    except (ConfigError, OSError, ValueError) as error:
        raise Unavailable(f"a sandbox did not start: {error}") from error
    proxied = host_proxy.ENVIRONMENT if settings.hosts else {}
    env = {"HOME": ROOT_HOME, "LC_ALL": "", **image["env"], **proxied, **settings.env}
    update: dict[str, Any] = {"env": {}, "workdir": settings.workdir or image["workdir"]}
    return str(root.files), settings.model_copy(update=update), env


@dataclass(frozen=True, slots=True)
class FrozenNamespace:
    """The files that a sandbox of this machine has left."""

    kept: KeptFiles

    async def close(self) -> None:
        self.kept.close()


class LocalSandbox:
    """A sandbox whose server of commands is a child process of this one, or is reached through one."""

    def __init__(
        self, process: ConfinedProcess, interpreter: Sequence[str] = INTERPRETER_COMMAND, kept: KeptFiles | None = None
    ) -> None:
        self._process, self._settings, self._interpreter = process, process.settings, list(interpreter)
        self._kept = kept
        self._memory_hits = 0

    @property
    def alive(self) -> bool:
        return self._process.alive

    @property
    def has_ended(self) -> bool:
        return self._process.process.exit_code is not None

    @property
    def python(self) -> Sequence[str]:
        return self._interpreter[: self._interpreter.index("-B")]

    async def run(
        self,
        command: Sequence[str],
        stdin: bytes,
        timeout_s: float,
        *,
        env: Mapping[str, str] = EMPTY,
        keeps_end: bool = False,
        grace_s: float = 0.0,
    ) -> Completed:
        """Runs a command. With `keeps_end` errors are part of its output, whose end is kept, whatever it prints. Once
        its time is over it gets SIGTERM, and `grace_s` to end by itself."""
        is_own = [*command[: len(self.python) + 1]] == [*self.python, "-I"]
        env = {"LC_ALL": "C"} if is_own else dict(env)  # Scripts of ours read no locale, which may be the policy's.
        request = {"do": "run", "command": list(command), "stdin": await encode_base64(stdin), "env": env}
        options = {"keeps_end": keeps_end, "grace_s": grace_s, **self._limits(timeout_s)}
        reply = await self._ask({**request, **options}, timeout_s + grace_s)
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

    async def set_environment(self, env: Mapping[str, str]) -> None:
        """Sets the environment of what is started from now on. On a command line everybody could read it."""
        await self._ask({"do": "env", "env": dict(env)}, START_S)

    async def end_processes(self) -> None:
        """Ends what was started in it."""
        await self._ask({"do": "end"}, FILE_S)

    async def end(self) -> None:
        await self._process.stop()

    async def stop(self) -> None:
        kept, self._kept = self._kept, None
        try:
            await self._process.stop()
        finally:
            if kept is not None:
                kept.close()

    async def freeze(self) -> FrozenFiles:
        await self._process.check_not_killed()
        await self._process.stop()
        kept, self._kept = self._kept, None
        if kept is None:
            raise SandboxEnded("it has kept no files")
        return FrozenNamespace(kept)

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
        await self.end()
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
async def opened(
    provider: SandboxProvider, settings: SandboxSettings, files_of: FrozenFiles | None = None
) -> AsyncIterator[Sandbox]:
    """A sandbox for a block."""
    sandbox = await provider.start(settings, files_of=files_of)
    try:
        yield sandbox
    finally:
        await sandbox.stop()
