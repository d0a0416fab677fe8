"""Stdio servers with `isolation: sandbox`: which of their files exist inside, and how they are started."""

from __future__ import annotations

import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

from gateway.config.models import Server
from gateway.mcp_client.rollout_folder import StartSettings, is_inside
from gateway.process.reaper import Reaper
from gateway.sandbox.bubblewrap import Confined
from gateway.sandbox.program_paths import find_program_paths
from gateway.sandbox.sandbox_layout import ROLLOUT
from gateway.sandbox.sandboxed_command import SandboxedCommand, open_command


@asynccontextmanager
async def open_sandboxed(
    config: Server, start: StartSettings, folder: Path | None, reaper: Reaper
) -> AsyncIterator[tuple[StartSettings, SandboxedCommand]]:
    """The settings with which the server is started in a sandbox, and the sandbox; all in it is killed at the end.

    Inside are its program, the files that its arguments name, its `cwd`, and its rollout's folder, which it may write.
    """
    program = shutil.which(start.command[0], path=start.env.get("PATH")) or start.command[0]
    command = (program, *(_absolute_file(argument) for argument in start.command[1:]))
    writable = () if folder is None else (str(folder),)
    readable = [*find_program_paths(Path(program)), *filter(os.path.isfile, command[1:])]
    if start.cwd is not None and not is_inside(start.cwd, folder):
        readable.append(str(start.cwd))
    env = {name: value for name, value in start.env.items() if name != "PATH"}
    settings = config.sandbox.model_copy(update={"env": {**config.sandbox.env, **env}})
    confined = Confined(command, settings, readable, writable, working_folder=str(start.cwd or ROLLOUT))
    async with open_command(confined, reaper) as held:
        yield replace(start, command=held.line, env={}, cwd=None), held


def _absolute_file(argument: str) -> str:
    """An argument that names a file, by its whole path: inside, there is no working folder of the gateway."""
    path = Path.cwd() / argument
    return str(path) if argument and path.is_file() else argument
