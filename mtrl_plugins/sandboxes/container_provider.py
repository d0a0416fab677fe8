"""Sandboxes that are containers of a Docker or Podman engine, which is used by its command line."""

from __future__ import annotations

import json
import logging
import os
import shlex
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from secrets import token_hex

import anyio
from anyio import to_thread

from gateway.errors import Unavailable
from gateway.process.reaper import Reaper
from gateway.process.spawn import run_command
from gateway.sandbox import host_proxy, proxy_listener, root_interpreter
from gateway.sandbox import sandbox_statistics as statistics
from gateway.sandbox.bubblewrap import OPEN_FILES
from gateway.sandbox.cgroups import OWN_PROCESSES, Cgroup
from gateway.sandbox.confined_process import ConfinedProcess, SandboxEnded, SandboxKilled
from gateway.sandbox.disk_watch import DISK_WATCH, WatchedDisk
from gateway.sandbox.host_proxy import HostProxy, open_proxy
from gateway.sandbox.provider import ENVIRONMENT, SCRIPTS, FrozenFiles, LocalSandbox, use_root
from gateway.sandbox.sandbox_layout import MEMORY_FOLDERS, ROLLOUT
from gateway.sandbox.sandbox_settings import SandboxSettings
from gateway.sandbox.sandbox_state import pack_files, unpack_files
from gateway.sandbox.sandboxed_command import OUTSIDE_SIGNALS, SandboxedCommand
from mtrl_plugins.sandboxes.settings import ContainerSettings

log = logging.getLogger(__name__)

PREFIX = "mtrl-sandbox-"
ENTRY, COMMAND_SERVER, INTERPRETER = INSIDE = tuple(f"/mtrl/{Path(file).name}" for file in SCRIPTS)
"""Where scripts are inside."""
LISTENER = "/mtrl/proxy_listener.py"
NOBODY = "65534:65534"
ENGINE_FAILURES = frozenset((125, 126, 127))
"""Exit codes of an engine that failed, or that cannot start the command."""
START_S, REMOVE_S, ASK_S = 60.0, 20.0, 20.0
MAX_HEADER_BYTES = 64 * 2**20
"""Of an archive, besides what its files have."""


class ContainerProvider:
    """Starts a container for each sandbox."""

    mounts_states = False

    def __init__(self, container: ContainerSettings, reaper: Reaper) -> None:
        self._container, self._reaper = container, reaper

    async def start(
        self,
        settings: SandboxSettings,
        state: Path | None = None,
        *,
        keeps_files: bool = False,
        files_of: FrozenFiles | None = None,
    ) -> LocalSandbox:
        root, env = "", settings.env
        if settings.root:
            root, settings, env = await to_thread.run_sync(use_root, settings)
            env = {**env, "HOME": ROLLOUT}  # The root itself can only be read.
        command = open_container(self._container, settings, self._reaper, root)
        process = await ConfinedProcess.start(command, self._reaper, START_S)
        try:
            if json.loads(process.ready).get("is_first") is not True:  # An option, such as `--init`, has another there.
                process.failure_codes = ENGINE_FAILURES
            python = (self._container.python, "-B", "-u", ENTRY, f"{INTERPRETER}:serve")
            started = ContainerSandbox(process, root_interpreter.INTERPRETER_COMMAND if root else python)
            await started.set_environment(_environment(settings, env))
            if isinstance(files_of, PackedFiles):
                await files_of.unpack(started)
        except BaseException as error:
            await process.stop()
            if isinstance(error, SandboxEnded | SandboxKilled | OSError):
                raise Unavailable(f"a container did not start: {error}") from error
            raise
        return started


class ContainerSandbox(LocalSandbox):
    """A sandbox in a container, whose files in `/rollout` are packed when it is frozen."""

    async def freeze(self) -> FrozenFiles:
        try:
            await self.end_processes()
            return PackedFiles(await pack_files(self, self._settings.disk_mb * 2**20 + MAX_HEADER_BYTES))
        except TimeoutError as error:  # It reads no more than its limits: the machine is too slow.
            raise Unavailable(f"its files cannot be packed: {error}") from error
        except OSError as error:
            raise SandboxEnded(f"its files cannot be packed: {error}") from error
        finally:
            await self.stop()


@dataclass(frozen=True, slots=True)
class PackedFiles:
    """What a container had in `/rollout`."""

    packed: bytes

    async def unpack(self, sandbox: LocalSandbox) -> None:
        """Puts the files into another one; raises OSError, SandboxEnded and SandboxKilled."""
        await unpack_files(sandbox, self.packed)

    async def close(self) -> None:
        """They are in memory only."""


@asynccontextmanager
async def open_container(
    container: ContainerSettings, settings: SandboxSettings, reaper: Reaper, root: str = ""
) -> AsyncIterator[SandboxedCommand]:
    """The command that runs a container in the foreground. It is removed at the end, even if the gateway is killed."""
    engine, name = tuple(shlex.split(container.engine)), f"{PREFIX}{os.getpid()}-{token_hex(6)}"
    remove = (*engine, "rm", "--force", name)
    async with AsyncExitStack() as stack:
        proxy = None
        if settings.hosts:
            proxy = await stack.enter_async_context(open_proxy(settings.hosts, settings.network_mb))
            proxy.socket_file.chmod(0o666)  # Its folder is the gateway's alone.
        image = ("--rootfs", f"{root}:O") if root else (container.image,)
        line = (*engine, "run", *_options(settings, name, proxy, root), *container.options, *image)
        await reaper.start()
        reaper.add_command(remove)
        disk = _writable_disk(settings, partial(_run_quietly, (*engine, "kill", name)))
        if disk is not None:
            await to_thread.run_sync(DISK_WATCH.add, disk)
        try:
            words, codes = (*line, *_command(container, proxy, root)), ENGINE_FAILURES | OUTSIDE_SIGNALS
            yield SandboxedCommand(words, Cgroup(), settings, disk, proxy, failure_codes=codes)
        finally:
            if disk is not None:
                DISK_WATCH.remove(disk)
                statistics.count_hits({"disk": int(bool(disk.problem))})
            with anyio.CancelScope(shield=True):
                if await to_thread.run_sync(_run_quietly, remove):
                    reaper.remove_command(remove)


def _command(container: ContainerSettings, proxy: HostProxy | None, root: str) -> Iterator[str]:
    python = (*(root_interpreter.LOADED_PYTHON if root else (container.python,)), "-I", "-S", "-B")
    if proxy is not None:
        listener = root_interpreter.script(proxy_listener) if root else LISTENER
        yield from (*python, listener, host_proxy.INSIDE, str(host_proxy.PORT), "--")
    yield from root_interpreter.SERVER_COMMAND if root else (*python, ENTRY, f"{COMMAND_SERVER}:serve")


def _environment(settings: SandboxSettings, env: Mapping[str, str]) -> dict[str, str]:
    """The environment of what runs inside. It is sent there: on the command line everybody could read it, and in the
    engine's own environment it could change what the engine does."""
    return {**ENVIRONMENT, **(host_proxy.ENVIRONMENT if settings.hosts else {}), **env}


def _writable_disk(settings: SandboxSettings, kill: Callable[[], object]) -> WatchedDisk | None:
    """The folders of the machine that it may write, if there are any."""
    if not settings.writable:
        return None
    folders = list(map(str, settings.writable))
    return WatchedDisk(folders, settings.disk_mb * 2**20, settings.files, kill=kill)


def _options(settings: SandboxSettings, name: str, proxy: HostProxy | None, root: str) -> Iterator[str]:
    """The options of `run`."""
    yield from ("--rm", "--interactive", f"--name={name}", "--pull=never", "--network=none", "--read-only")
    yield from (
        "--cap-drop=ALL",
        "--security-opt=no-new-privileges",
        f"--user={NOBODY}",
        f"--workdir={settings.workdir or ROLLOUT}",
    )
    yield from (f"--memory={settings.memory_mb}m", f"--memory-swap={settings.memory_mb}m", f"--cpus={settings.cpus:g}")
    yield from (f"--pids-limit={settings.processes + OWN_PROCESSES}", f"--ulimit=cpu={settings.cpu_s}")
    yield from (f"--ulimit=nofile={OPEN_FILES}", "--ulimit=core=0", f"--ulimit=fsize={settings.disk_mb * 2**20}")
    for folder in MEMORY_FOLDERS:
        yield f"--tmpfs={folder}:rw,exec,mode=1777,size={settings.disk_mb}m"
    yield f"--env=HOME={ROLLOUT}"
    scripts = root_interpreter.interpreter_files() if root else dict(zip(INSIDE, SCRIPTS, strict=True))
    readable = {**scripts, **{str(path): str(path) for path in settings.readable}}
    if proxy is not None:
        readable |= {} if root else {LISTENER: proxy_listener.__file__}
        yield f"--volume={proxy.socket_file}:{host_proxy.INSIDE}"
    for inside, path in readable.items():
        yield f"--volume={path}:{inside}:ro"
    for writable in settings.writable:
        yield f"--volume={writable}:{writable}:rw"


def _run_quietly(words: tuple[str, ...]) -> bool:
    """Runs a command of the engine; whether it did what it should."""
    try:
        return run_command(words, REMOVE_S).status == 0
    except OSError as error:
        log.error("%s failed: %s", " ".join(words), error)
        return False


def find_container_problem(container: ContainerSettings) -> str | None:
    """Why containers cannot be started, with what to do; None if they can."""
    engine = tuple(shlex.split(container.engine))
    if not container.image:
        try:
            can_run_roots = b"--rootfs" in run_command((*engine, "run", "--help"), ASK_S).output
        except OSError as error:
            return f"{container.engine} does not run: {error}\n  remedy: install Podman"
        return None if can_run_roots else f"{container.engine} cannot run a `root`\n  remedy: use `podman`"
    try:
        done = run_command((*engine, "image", "inspect", "--format={{.Id}}", container.image), ASK_S)
    except OSError as error:
        return f"{container.engine} does not run: {error}\n  remedy: install Podman or Docker, or correct `engine`"
    if done.status == 0:
        return None
    problem = f"{container.engine} has no image {container.image}: {done.error_text[-300:]}"
    return f"{problem}\n  remedy: {container.engine} pull {container.image}"
