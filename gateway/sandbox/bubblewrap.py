"""The command line of bubblewrap for a sandbox, and whether bubblewrap works on this machine."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from gateway.process.spawn import Finished, run_command
from gateway.sandbox import host_proxy, proxy_listener, root_entry, state_mount
from gateway.sandbox.cgroups import OWN_PROCESSES
from gateway.sandbox.command_server import ENDED_INSIDE
from gateway.sandbox.kept_files import KeptFiles
from gateway.sandbox.memory_files import descriptor_path, join_options, open_file, shared_file
from gateway.sandbox.root_interpreter import LOADED_PYTHON, PLACE, interpreter_files, script
from gateway.sandbox.sandbox_environment import ENVIRONMENT, give_back, held_names, hold_back
from gateway.sandbox.sandbox_layout import (
    CERTIFICATES,
    COPIED_FILES,
    MEMORY_FOLDERS,
    MORE_SYSTEM_FILES,
    ROLLOUT,
    SYSTEM_FOLDERS,
    SandboxLayout,
    inside_socket,
    make_layout,
)
from gateway.sandbox.sandbox_settings import SandboxSettings
from gateway.sandbox.system_call_filter import filter_program, has_filter

NEEDED_PROGRAMS = ("bwrap", "setpriv", "mount")
OPEN_FILES = 1024
FILE_BLOCK_BYTES = 512
INFO_DESCRIPTOR, OPTIONS_DESCRIPTOR, FILTER_DESCRIPTOR = 6, 7, 9
INFO_BYTES = 4096
LISTENER_COMMAND = (sys.executable, "-I", "-S", "-B", proxy_listener.__file__)
STATE_COMMAND = (sys.executable, "-I", "-S", "-B", state_mount.__file__)
OWN_FILES = 16
"""Folders that an overlay has besides the files of its user."""
PROBE_S = 20.0
ROOT_FOLDERS = ("/proc", "/dev", PLACE, "/tmp", ROLLOUT)  # noqa: S108 - inside
"""Folders that each root has."""
PRELOADED = "/etc/ld.so.preload"
"""Whose libraries the loader puts into each program: in a root it is empty, since the loader runs there with rights."""
MASKED_FILES = tuple(
    Path(__file__).with_name("masked_proc") / name for name in ("cmdline", "loadavg", "meminfo", "stat")
)
"""What a sandbox reads in place of files in `/proc` that tell of the machine: no command line of the kernel, no load,
no processor time, and the memory that a sandbox has by default."""
EMPTY_FILE = MASKED_FILES[0]
PROBE_USER, NO_STATE = 65_534, "/none.tar"
JOIN = """
started=$1 info=$2 options=$3 mounts=$4 filter=$5 first=$6 second=$7 group=$8; shift 8
[ -z "$group" ] || echo 0 > "$group/cgroup.procs" || exit 125
exec "$@" 3< "$first" 4< "$second" 5> "$started" 6> "$info" 7< "$options" 8< "$mounts" 9< "$filter"
"""
"""Runs outside: joins the control group, and opens what is written and read: whether the command was started, the
number of bubblewrap's child, its options, the list of mounts, the filter of system calls, and two files that are
copied."""
ENTER = """
mount -a -T /dev/fd/8 || exit 125
cd "$7" || exit 125
export LANG="$8"
enter() {
    ulimit -c 0 && ulimit -t "$1" && ulimit -f "$2" && ulimit -n "$3" && ulimit "$5" "$6" || exit 125
    ulimit -u "$4" 2> /dev/null || ulimit -p "$4" || exit 125  # bash, dash
    shift 9
    echo >&5
    exec "$@" 5>&- 8<&-
}
[ -n "$9" ] || enter "$@"
exec 9>&2 2> /dev/null  # It would tell of the signal that ended the command.
(exec 2>&9 9>&-; enter "$@")
exit "$9"
"""
"""Runs inside, before all rights are given up: mounts the folders in memory, which bubblewrap makes without a limit on
files, and sets the limits of single processes. With a language, the programs that do this would look for its files.
With an exit status, root's process 1 stays, and ends with it after the command: nobody else can signal or limit it."""


@dataclass(frozen=True, slots=True)
class Confined:
    """A command and what it is confined by."""

    command: Sequence[str]
    settings: SandboxSettings
    readable: Sequence[str] = ()
    """Paths that the command itself needs, besides those of the settings."""
    writable: Sequence[str] = ()
    env: Mapping[str, str] | None = None
    """Variables of ours, which the settings do not change."""
    working_folder: str = ROLLOUT
    user: int = 0
    """Who runs it, where the gateway is root's."""
    group: Path | None = None
    """The folder of its control group."""
    limits_memory_by_process: bool = False
    """Whether each process has the limit on memory too, so that Python raises a MemoryError. Always without a group."""
    reserves_memory: bool = False
    """Whether that limit is on the memory that a process may write alone: Node.js reserves 10 GB to begin with."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Files outside that can be read, by their path inside."""
    sockets: Mapping[int, str] = field(default_factory=dict)
    """Socket files outside, by the ports of its loopback interface whose listening sockets are handed over there."""
    state: str = ""
    """The prepared folder or archive that the working folder begins as."""
    root: str = ""
    """The folder of its root, in place of the machine's system."""
    kept: KeptFiles | None = None
    """What keeps its files for the boxes that follow, and has those of earlier ones."""
    is_first_process: bool = False
    """Whether process 1 inside is ours, and reaps the others; without a user of its own, the command itself is it.
    Nothing inside can end it, so that its end by a signal tells of something outside."""


@dataclass(frozen=True, slots=True)
class CommandLine:
    """A command line of bubblewrap, and the files in memory that it reads and writes."""

    words: tuple[str, ...]
    info: int
    """The descriptor of what bubblewrap writes about its child."""
    started: int
    """The descriptor of what is written just before the command is started. No exit status tells that: the command may
    end with each."""

    @property
    def has_started(self) -> bool:
        """Whether the sandbox was set up, and the command has been started in it."""
        return bool(os.pread(self.started, 1, 0))

    @property
    def first_process(self) -> int | None:
        """The process that is number 1 inside, by its number outside; None if it has not been started."""
        try:
            return int(json.loads(os.pread(self.info, INFO_BYTES, 0))["child-pid"])
        except ValueError:
            return None


@contextmanager
def open_command_line(confined: Confined) -> Iterator[CommandLine]:
    """The command line that runs a command confined, once, within the block.

    Options have the environment with its secrets: everybody could read them on the command line.
    """
    settings = confined.settings
    if confined.kept is not None:
        confined.kept.place = confined.kept.place or _state_place(confined)
    proxied, ours = host_proxy.ENVIRONMENT if settings.hosts else {}, confined.env or {}
    environment = {**ENVIRONMENT, **proxied, **ours, **hold_back(settings.env, ours)}
    if confined.root:  # Of its locales, which may be the policy's, nothing is read.
        environment["LC_ALL"] = "C"
    inner = _enter_root(confined) if confined.root else _enter(confined, environment.pop("LANG"))
    has_files = bool(confined.state or confined.kept)
    folders = [folder for folder in _layout(confined).own_memory_folders if folder != ROLLOUT or not has_files]
    options = f"nosuid,nodev,mode=1777,size={settings.disk_mb}m,nr_inodes={settings.files}"
    mounts = "".join(f"tmpfs {folder} tmpfs {options}\n" for folder in folders)
    shared = (shared_file(mounts.encode()), _filter_file(confined))
    started, info = open_file(b""), open_file(b"")
    held = (started, info, open_file(join_options(_options(confined, environment))))
    copied = (path if path in _layout(confined).copied else os.devnull for path in COPIED_FILES.values())
    files = (*map(descriptor_path, held), *shared, *copied)
    outer = ("/bin/sh", "-c", JOIN, "sh", *files, str(confined.group or ""))
    with_state = _mount_layers(confined) if confined.kept else _mount_state(confined) if confined.state else ()
    bubblewrap = (*with_state, shutil.which("bwrap") or "bwrap", "--args", str(OPTIONS_DESCRIPTOR), "--")
    try:
        yield CommandLine((*outer, *bubblewrap, *inner, *confined.command), info, started)
    finally:
        for descriptor in held:
            os.close(descriptor)


def _enter(confined: Confined, language: str) -> tuple[str, ...]:
    """What runs inside before the command."""
    listen = (*LISTENER_COMMAND, *_listeners(confined)) if confined.sockets else ()
    status = str(ENDED_INSIDE) if confined.is_first_process and confined.user else ""
    enter = ("/bin/sh", "-c", ENTER, "sh", *_limits(confined), confined.working_folder, language, status)
    return (*enter, *listen, *_drop_rights(confined), *give_back(confined.settings.env, confined.env or {}))


def _enter_root(confined: Confined) -> tuple[str, ...]:
    """What runs before the command in a root, of which it uses nothing."""
    settings, python = confined.settings, (*LOADED_PYTHON, "-I", "-S", "-B")
    listen = (*python, script(proxy_listener), *_listeners(confined)) if confined.sockets else ()
    limits = {
        "RLIMIT_CORE": 0, "RLIMIT_CPU": settings.cpu_s, "RLIMIT_FSIZE": settings.disk_mb * 2**20,
        "RLIMIT_NOFILE": OPEN_FILES, "RLIMIT_NPROC": settings.processes + OWN_PROCESSES,
    }  # fmt: skip
    if confined.limits_memory_by_process:
        limits["RLIMIT_DATA" if confined.reserves_memory else "RLIMIT_AS"] = settings.memory_mb * 2**20
    values = {
        "limits": limits, "user": confined.user, "workdir": settings.workdir or ROLLOUT,
        "shared": f"mode=1777,size={settings.disk_mb}m,nr_inodes={settings.files}",
        "held": held_names(settings.env, confined.env or {}),
    }  # fmt: skip
    return (*listen, *python, script(root_entry), json.dumps(values))


def _listeners(confined: Confined) -> Iterator[str]:
    """The arguments of `proxy_listener.py` before the command."""
    for port in confined.sockets:
        yield from (inside_socket(port), str(port))
    yield "--"


def find_copy_reason(state: Path) -> str:
    """Why sandboxes begin with a copy of a prepared state; empty if it lies under an overlay instead."""
    try:
        done = _probe_state(str(state.resolve()))
    except OSError as error:
        return str(error)
    return done.text if done.status == 0 else done.error_text


@cache
def can_mount_states() -> bool:
    """Whether a state can be mounted at all: some systems let nobody but bubblewrap make namespaces."""
    try:
        return _probe_state(NO_STATE).status == 0
    except OSError:
        return False


def _probe_state(state: str) -> Finished:
    confined = Confined((), SandboxSettings(), state=state, user=PROBE_USER if os.geteuid() == 0 else 0)
    return run_command(_mount_state(confined, is_probe=True), PROBE_S)


def _mount_state(confined: Confined, *, is_probe: bool = False) -> tuple[str, ...]:
    """The command that makes the working folder of the state, and goes on as what follows it."""
    settings = confined.settings
    values = {
        "place": _state_place(confined), "state": confined.state, "user": confined.user,
        "bytes": settings.disk_mb * 2**20, "files": settings.files + OWN_FILES, "probe": is_probe,
    }  # fmt: skip
    return (*STATE_COMMAND, json.dumps(values))


def _mount_layers(confined: Confined) -> tuple[str, ...]:
    """The command that lays the box's files over its root or state and what earlier boxes left."""
    settings, kept, layout = confined.settings, confined.kept, _layout(confined)
    if kept is None:
        raise ValueError("nothing keeps the files of this box")
    paths = (*layout.readable, *layout.writable, *map(inside_socket, confined.sockets))
    points = [f"{path}/" if os.path.isdir(path) else path for path in paths]
    values = {
        "place": kept.place, "lower": confined.root or confined.state, "is_root": bool(confined.root),
        "user": confined.user, "depth": kept.depth, "kept": kept.paths,
        "bytes": settings.disk_mb * 2**20, "files": settings.files + OWN_FILES,
        "points": [*(f"{path}/" for path in ROOT_FOLDERS), PRELOADED, *points] if confined.root else (),
    }  # fmt: skip
    return (*STATE_COMMAND, json.dumps(values))


def _state_place(confined: Confined) -> str:
    ours = (*MASKED_FILES, *(interpreter_files().values() if confined.root else ()))
    others = (*confined.files.values(), confined.state, confined.root, *map(str, ours))
    return _layout(confined).find_state_place(others)


def _limits(confined: Confined) -> Iterator[str]:
    """The first arguments of `ENTER`."""
    settings = confined.settings
    yield from (str(settings.cpu_s), str(settings.disk_mb * 2**20 // FILE_BLOCK_BYTES), str(OPEN_FILES))
    yield str(settings.processes + OWN_PROCESSES)
    yield "-d" if confined.reserves_memory else "-v"
    yield str(settings.memory_mb * 1024) if confined.limits_memory_by_process else "unlimited"


def _drop_rights(confined: Confined) -> Iterator[str]:
    """Becomes an unprivileged user without capabilities."""
    yield from ("setpriv", "--no-new-privs", "--inh-caps=-all", "--bounding-set=-all")
    if confined.user:
        yield from (f"--reuid={confined.user}", f"--regid={confined.user}", "--clear-groups")


def _options(confined: Confined, environment: Mapping[str, str]) -> Iterator[str]:
    is_root = os.geteuid() == 0
    yield from ("--die-with-parent", "--clearenv", "--cap-drop", "ALL", "--info-fd", str(INFO_DESCRIPTOR))
    if confined.is_first_process:
        yield "--as-pid-1"
    yield from ("--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try")
    yield from ("--hostname", "sandbox", "--cap-add", "CAP_SYS_ADMIN", "--cap-add", "CAP_SETPCAP")
    if is_root:
        yield from ("--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID")
    else:
        yield from ("--unshare-user", "--uid", "0", "--gid", "0")
    if has_filter():
        yield from ("--seccomp", str(FILTER_DESCRIPTOR))
    yield from _mounts(confined)
    for name, value in environment.items():
        yield from ("--setenv", name, value)


def _layout(confined: Confined) -> SandboxLayout:
    named = tuple(map(str, confined.settings.readable))  # One of these that is missing is an error of bubblewrap.
    writable = (*confined.writable, *map(str, confined.settings.writable))
    if confined.root:
        return make_layout((), tuple(confined.readable), named, writable)
    listens = (*python_folders(), LISTENER_COMMAND[-1]) if confined.sockets else ()
    certificates = (CERTIFICATES,) if confined.settings.hosts else ()
    needed = tuple(path for path in (*listens, *certificates, *confined.readable) if os.path.exists(path))
    return make_layout(_system_paths(), needed, named, writable)


@cache
def _system_paths() -> tuple[str, ...]:
    """What this machine has of the system that sandboxes are given."""
    return tuple(path for path in (*SYSTEM_FOLDERS, *MORE_SYSTEM_FILES) if os.path.exists(path))


def _mounts(confined: Confined) -> Iterator[str]:
    layout, kept = _layout(confined), confined.kept
    merged = kept.merged if kept is not None else f"{_state_place(confined)}/merged" if confined.state else ""
    if confined.root:
        yield from ("--bind", merged, "/", "--tmpfs", PLACE, "--ro-bind", str(EMPTY_FILE), PRELOADED)
    yield from ("--proc", "/proc", "--dev", "/dev")
    for file in MASKED_FILES:
        yield from ("--ro-bind", str(file), f"/proc/{file.name}")
    if not confined.root:
        for folder in MEMORY_FOLDERS:
            yield from ("--dir", folder)
        for folder in layout.shared_memory_folders:
            yield from ("--perms", "1777", "--size", str(confined.settings.disk_mb * 2**20), "--tmpfs", folder)
        yield from _system_files(layout)
    sockets = {inside_socket(port): file for port, file in confined.sockets.items()}
    ours = interpreter_files() if confined.root else {}
    named = dict(zip(layout.readable, layout.readable, strict=True))
    for inside, path in {**named, **ours, **confined.files, **sockets}.items():
        yield from ("--ro-bind", path, inside)
    yield from ("--remount-ro", "/dev")
    for path in layout.writable:
        yield from ("--bind", path, path)
    if confined.root:
        yield from ("--remount-ro", PLACE)
        return
    if merged:
        yield from ("--bind", merged, ROLLOUT)
    yield from ("--remount-ro", "/")


def _system_files(layout: SandboxLayout) -> Iterator[str]:
    """What is made rather than mounted. Folders that are mounted later may lie over it."""
    for parent in layout.parents:
        yield from ("--perms", "0755", "--dir", parent)
    for descriptor, path in COPIED_FILES.items():
        if path in layout.copied:
            yield from ("--perms", "0644", "--file", str(descriptor), path)
    for path, target in layout.links:
        yield from ("--symlink", target, path)


def _filter_file(confined: Confined) -> str:
    if not has_filter():
        return os.devnull
    return shared_file(filter_program(confined.settings.network != "none", confined.group is not None))


@cache
def python_folders() -> tuple[str, ...]:
    """Where the interpreter of this process and its packages are."""
    return tuple(dict.fromkeys((sys.base_prefix, os.path.realpath(sys.prefix), sys.prefix)))


def is_known_to_work() -> bool:
    """Whether bubblewrap has worked in this process."""
    return bool(_WORKS)


def find_problem() -> str | None:
    """Why bubblewrap cannot be used on this machine, with what to do; None if it can.

    It is tried until it works: a failure may pass.
    """
    if not _WORKS:
        if problem := _try_it():
            return problem
        _WORKS.append(True)
    return None


_WORKS: list[bool] = []


def measure_start() -> float | None:
    """Seconds that a sandbox takes here from its start to its end; None if it fails."""
    began = time.perf_counter()
    return None if _try_it() else time.perf_counter() - began


def _try_it() -> str | None:
    missing = [name for name in NEEDED_PROGRAMS if shutil.which(name) is None]
    if missing:
        packages = "bubblewrap, util-linux and mount"
        return f"{', '.join(missing)} is not installed\n  remedy: install {packages}; they need Linux"
    confined = Confined(("/bin/sh", "-c", "echo confined"), SandboxSettings())
    try:
        with open_command_line(confined) as line:
            done = run_command(line.words, PROBE_S)
    except OSError as error:
        return f"bubblewrap does not start: {error}"
    if done.output == b"confined\n":
        return None
    remedy = (
        "enable user namespaces (sysctl kernel.unprivileged_userns_clone=1, user.max_user_namespaces=10000), or run"
    )
    return f"bubblewrap fails: {done.error_text[-300:]}\n  remedy: {remedy} the gateway where it may make namespaces"
