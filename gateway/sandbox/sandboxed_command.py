"""Opens what one sandbox holds outside: a user of its own, a control group, its command line, the watch on its disk."""

from __future__ import annotations

import logging
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, replace

import anyio
from anyio import to_thread

from gateway.errors import Unavailable
from gateway.process.reaper import Reaper
from gateway.sandbox import sandbox_statistics as statistics
from gateway.sandbox.bubblewrap import CommandLine, Confined, find_problem, is_known_to_work, open_command_line
from gateway.sandbox.cgroups import REMOVE_S, Cgroup, make_group, remove_group
from gateway.sandbox.disk_watch import DISK_WATCH, WatchedDisk
from gateway.sandbox.host_proxy import PORT, HostProxy, open_proxy
from gateway.sandbox.outside_waits import OutsideWaits
from gateway.sandbox.program_users import unused_user
from gateway.sandbox.sandbox_settings import SandboxSettings

log = logging.getLogger(__name__)

SIGNAL_CODES = 128
OUTSIDE_SIGNALS = frozenset(range(SIGNAL_CODES + 1, SIGNAL_CODES + 65))
"""Exit codes that tell of the signal by which the first process was ended, which nothing inside can do."""
_warned: set[str] = set()


@dataclass(frozen=True, slots=True)
class SandboxedCommand:
    """A command line that is confined, and what limits its processes."""

    line: tuple[str, ...]
    group: Cgroup
    settings: SandboxSettings
    disk: WatchedDisk | None = None
    proxy: HostProxy | None = None
    failure_codes: frozenset[int] = frozenset()
    """Exit codes that nothing inside can bring about."""
    has_started: Callable[[], bool] = lambda: True
    """Whether the command was started, after its sandbox had been set up."""
    user: int = 0
    """Who runs it, where the gateway is root's."""

    def take_refusals(self) -> tuple[str, ...]:
        """The connections that were refused since the last time."""
        refusals = self.proxy.take_refusals() if self.proxy is not None else ()
        statistics.count_hits({"network": len(refusals)})
        return refusals

    @property
    def waits(self) -> OutsideWaits | None:
        """Its waits for hosts, where it has a list of them."""
        return None if self.proxy is None else self.proxy.waits

    def find_limit(self, known: int = 0) -> str:
        """The limit that ended its processes, as text; empty if none did but those `known` of its memory."""
        if self.disk is not None and self.disk.problem:
            return self.disk.problem
        if self.group.hits()["memory"] > known:
            return f"its processes used more than {self.settings.memory_mb} MB of memory"
        return ""


@asynccontextmanager
async def open_command(confined: Confined, reaper: Reaper | None) -> AsyncIterator[SandboxedCommand]:
    """A confined command line, for one process. At the end whatever it left is killed; with a reaper, even if the
    gateway is killed.

    Raises Unavailable where nothing can be confined.
    """
    problem = find_problem() if is_known_to_work() else await to_thread.run_sync(find_problem)
    if problem is not None:
        statistics.STATISTICS.refusals += 1
        raise Unavailable(f"no sandbox can be started: {problem}")
    if reaper is not None:
        await reaper.start()
    settings = confined.settings
    is_users = os.geteuid() != 0 or confined.kept is not None
    with nullcontext(confined.kept.user if confined.kept else 0) if is_users else unused_user() as user:
        for path in confined.writable if user else ():
            await to_thread.run_sync(_give_to, user, path)
        group = _make_group(settings)
        if reaper is not None and group.folder is not None:
            reaper.add_group(group.folder)
        try:
            async with open_proxy(settings.hosts, settings.network_mb) if settings.hosts else nullcontext() as proxy:
                held = replace(
                    confined,
                    user=user,
                    group=group.folder,
                    limits_memory_by_process=confined.limits_memory_by_process or group.folder is None,
                    sockets={**confined.sockets, **({PORT: str(proxy.socket_file)} if proxy is not None else {})},
                )
                with open_command_line(held) as line:
                    async with _watch_disk(held, line) as disk:
                        codes = OUTSIDE_SIGNALS if held.is_first_process else frozenset[int]()
                        yield SandboxedCommand(
                            line.words, group, settings, disk, proxy, codes, lambda: line.has_started, user
                        )
        finally:
            await _remove(group, reaper)


def _make_group(settings: SandboxSettings) -> Cgroup:
    """A control group. Where there is none, limits hold for each process, which is told once, or nothing is started."""
    group = make_group(settings)
    if not group.problem:
        return group
    if settings.control_groups == "required":
        statistics.STATISTICS.refusals += 1
        raise Unavailable(f"no sandbox can be started: {group.problem}, and `control_groups` is `required`")
    statistics.STATISTICS.without_group += 1
    if group.problem not in _warned:
        _warned.add(group.problem)
        log.warning(
            "sandboxes: %s; memory and CPU are limited for each process, and not for all together", group.problem
        )
    return group


@asynccontextmanager
async def _watch_disk(confined: Confined, line: CommandLine) -> AsyncIterator[WatchedDisk | None]:
    """Watches the folders of the machine that it may write."""
    settings = confined.settings
    folders = [*confined.writable, *map(str, settings.writable)]
    if not folders:
        yield None
        return
    disk = WatchedDisk(folders, settings.disk_mb * 2**20, settings.files, lambda: line.first_process)
    await to_thread.run_sync(DISK_WATCH.add, disk)
    try:
        yield disk
    finally:
        DISK_WATCH.remove(disk)
        statistics.count_hits({"disk": int(bool(disk.problem))})


def _give_to(user: int, folder: str) -> None:
    """Makes the user the owner of a folder that is the rollout's alone."""
    for path, _, names in os.walk(folder):
        os.chown(path, user, -1, follow_symlinks=False)
        for name in names:
            os.chown(os.path.join(path, name), user, -1, follow_symlinks=False)


async def _remove(group: Cgroup, reaper: Reaper | None) -> None:
    """Removes the group; one that killed processes have not left yet, in a thread."""
    statistics.count_hits(group.hits())
    if (folder := group.folder) is None:
        return
    with anyio.CancelScope(shield=True):
        gone = remove_group(folder) or await to_thread.run_sync(remove_group, folder, REMOVE_S)
    if gone and reaper is not None:  # Else the reaper does it when the gateway ends.
        reaper.remove_group(folder)
