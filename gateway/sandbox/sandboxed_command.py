"""Opens what one sandbox holds outside: a user of its own, control groups, and the filter of system calls."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace

import anyio
from anyio import to_thread

from gateway.errors import Unavailable
from gateway.mcp_client.reaper import Reaper
from gateway.sandbox import sandbox_statistics as statistics
from gateway.sandbox.bubblewrap import Confined, command_line, find_problem
from gateway.sandbox.cgroups import REMOVE_S, Cgroup, make_group, remove_group
from gateway.sandbox.program_users import unused_user


@dataclass(frozen=True, slots=True)
class SandboxedCommand:
    """A command line that is confined, and the group that its processes are in."""

    line: tuple[str, ...]
    group: Cgroup


@asynccontextmanager
async def open_command(confined: Confined, reaper: Reaper) -> AsyncIterator[SandboxedCommand]:
    """A confined command line, for one process. At the end whatever it left is killed, even if the gateway is.

    Raises Unavailable where nothing can be confined.
    """
    problem = await to_thread.run_sync(find_problem)
    if problem is not None:
        statistics.count_refusal()
        raise Unavailable(f"no sandbox can be started: {problem}")
    await reaper.start()
    with _user() as user:
        for path in confined.writable if user else ():
            await to_thread.run_sync(_give_to, user, path)
        group = make_group(confined.settings)
        for folder in group.unique_folders:
            reaper.add_group(folder)
        try:
            held = replace(
                confined,
                user=user,
                group_files=group.process_files,
                limits_memory_by_process="memory" not in group.folders,
            )
            yield SandboxedCommand(command_line(held), group)
        finally:
            await _remove(group, reaper)


@contextmanager
def _user() -> Iterator[int]:
    if os.geteuid() != 0:
        yield 0
        return
    with unused_user() as user:
        yield user


def _give_to(user: int, folder: str) -> None:
    """Makes the user the owner of a folder that is the rollout's alone."""
    for path, _, names in os.walk(folder):
        os.chown(path, user, -1, follow_symlinks=False)
        for name in names:
            os.chown(os.path.join(path, name), user, -1, follow_symlinks=False)


async def _remove(group: Cgroup, reaper: Reaper) -> None:
    """Removes the groups; those that killed processes have not left yet, in a thread."""
    statistics.count_hits(group.hits())
    for folder in group.unique_folders:
        with anyio.CancelScope(shield=True):
            gone = remove_group(folder) or await to_thread.run_sync(remove_group, folder, REMOVE_S)
        if gone:  # Else the reaper does it when the gateway ends.
            reaper.remove_group(folder)
