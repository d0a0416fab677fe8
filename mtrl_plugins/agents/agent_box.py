"""The box of a rollout in which its agent runs: a sandbox with the endpoint of its session, and nothing else outside.

The grader judges what the agent left in it.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import tarfile
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import anyio
from anyio import to_thread

from gateway.errors import ConfigError, Unavailable
from gateway.process.reaper import Reaper
from gateway.sandbox.choose_provider import find_provider_problem
from gateway.sandbox.confined_process import SandboxEnded, SandboxKilled
from gateway.sandbox.grade_settings import GradeSettings, resolve_grade
from gateway.sandbox.grader import Grade, Grader
from gateway.sandbox.program_paths import find_installation, find_interpreters, is_of_system
from gateway.sandbox.provider import BubblewrapProvider, LocalSandbox
from gateway.sandbox.roots import find_root, find_workdir
from gateway.sandbox.sandbox_environment import ENVIRONMENT
from gateway.sandbox.sandbox_paths import resolve_paths
from gateway.sandbox.sandbox_settings import PATHS
from gateway.sandbox.sandbox_state import MAX_BYTES, pack_state, unpack_files
from gateway.state.prepared_state import StateError
from mtrl_plugins.agents.agent_process import (
    AgentExit,
    fill,
    make_environment,
    make_words,
    read_stdin,
    work_folder,
    write_files,
)
from mtrl_plugins.agents.settings import AgentSandbox, AgentSettings
from trainer.rollout.task import Task

PORT = 8767
"""Of the endpoint, inside."""
URL = f"http://127.0.0.1:{PORT}"
TASK_FILE = "/tmp/.task.json"  # noqa: S108 - inside
PROXIES = dict.fromkeys(("NO_PROXY", "no_proxy"), "127.0.0.1,localhost")
"""The endpoint is reached without the proxy of a list of hosts."""
BYTES_OF_A_CHARACTER = 4
ENDED_FROM_OUTSIDE = 137
NOT_STARTED = 127
UNCONFINED = "they run as your user, with your files and your network"

log = logging.getLogger(__name__)


class Program(NamedTuple):
    """How an agent's program is started: its word, what it sees of this machine, and where programs are found."""

    word: str
    readable: tuple[str, ...]
    path: str


def choose_box(settings: AgentSettings) -> AgentSandbox | None:
    """What programs of agents are confined by: a sandbox wherever bubblewrap works, unless they shall not be. Raises
    ConfigError for one that is asked for, and cannot be."""
    if settings.command is None:
        return None
    if settings.sandbox == "none":
        log.warning("`agent.sandbox: none`: agents, and what the policy has them run, are not confined: %s", UNCONFINED)
        return None
    box = settings.sandbox or AgentSandbox()
    if problem := find_provider_problem(box):
        if settings.sandbox is not None or settings.grade is not None:
            raise ConfigError(f"agents cannot be confined here: {problem}", field="agent.sandbox")
        log.warning("agents, and what the policy has them run, are not confined: %s: %s", UNCONFINED, problem)
        return None
    if settings.grade is not None:
        resolve_grade(settings.grade, Path.cwd(), None, "agent.grade")
    if settings.cwd is not None and _measure(settings.cwd) > MAX_BYTES:
        remedy = "keep the large files elsewhere, and name their folder in `agent.sandbox.readable`"
        problem = f"has more than {MAX_BYTES // 2**20} MB, the most that is copied into the sandbox of each rollout"
        raise ConfigError(problem, file=settings.cwd, field="agent.cwd", remedy=remedy)
    resolved = resolve_paths(Path.cwd(), box, None, "agent.sandbox")
    return box.model_copy(update={name: getattr(resolved, name) for name in PATHS})


def _measure(folder: Path) -> int:
    """The size of a folder's files as they are packed: each has a header, and ends with a whole block."""
    files = (os.path.join(place, name) for place, _, names in os.walk(folder) for name in names)
    sizes = [0 if os.path.islink(file) else os.path.getsize(file) for file in files]
    return sum(tarfile.BLOCKSIZE + size + -size % tarfile.BLOCKSIZE for size in sizes)


def find_program(settings: AgentSettings, box: AgentSandbox) -> Program:
    """Finds the program as it will be seen inside; raises ConfigError with the name of what is not."""
    word, search = settings.words[0], settings.env.get("PATH")
    root = find_root(box.root).files if box.root else None
    inside = find_root(box.root).image["env"].get("PATH", "") if box.root else ""
    folders = (inside or ENVIRONMENT["PATH"]).split(":")
    named = [argument for argument in settings.words[1:] if "{" not in argument and os.path.isabs(argument)]
    files = tuple(filter(os.path.isfile, named))
    is_own = "{" in word or word.removeprefix("./") in settings.files or ("/" in word and not os.path.isabs(word))
    if is_own or (root is not None and _is_in_root(root, word, folders)):
        return Program(word, files, ":".join(folders))
    found = shutil.which(word, path=search)
    if found is None:
        raise _not_inside(word, box, "")
    programs = [*find_interpreters(Path(found), search)]
    for program in programs:
        if not program.exists() or (root is not None and not _is_seen(root, program, box)):
            raise _not_inside(str(program), box, f", which {word} needs" if program is not programs[0] else "")
    own = dict.fromkeys(str(program.parent) for program in programs if not is_of_system(program))
    readable = dict.fromkeys(path for program in programs for path in find_installation(program))
    return Program(found, (*readable, *files), ":".join((*own, *folders)))


def _is_in_root(root: Path, word: str, folders: list[str]) -> bool:
    places = [word] if "/" in word else [f"{folder}/{word}" for folder in folders]
    return any(os.path.lexists(root / place.lstrip("/")) for place in places)


def _is_seen(root: Path, program: Path, box: AgentSandbox) -> bool:
    """Whether a program of this machine runs in a root: its installation is shown there, the system's is not."""
    hidden = [place for place in (program, program.resolve()) if is_of_system(place)]
    hidden = [place for place in hidden if not any(map(place.is_relative_to, box.readable))]
    return all(os.path.lexists(root / str(place).lstrip("/")) for place in hidden)


def _not_inside(program: str, box: AgentSandbox, why: str) -> ConfigError:
    where, remedy = "there is", "name an installed program, or its whole path"
    if box.root:
        where = f"the root {box.root!r} has"
        remedy = "install it in the image, or name its folder in `agent.sandbox.readable`"
    return ConfigError(f"{where} no program {program!r}{why}", field="agent.command", remedy=remedy)


def box_of_task(box: AgentSandbox, task: Task) -> AgentSandbox:
    """The settings with the root that the row names."""
    root = task.columns.get(box.root_column) if box.root_column else None
    return box if root is None else box.model_copy(update={"root": str(root)})


@dataclass(frozen=True, slots=True)
class AgentBox:
    """The box of one rollout."""

    settings: AgentSettings
    box: AgentSandbox
    program: Program
    sandbox: LocalSandbox
    reaper: Reaper

    async def run(self, about: Mapping[str, Any], within_s: float) -> AgentExit:
        """Runs the program to its end; cancelling it ends it with all that it started. Raises Unavailable."""
        settings, folder = self.settings, find_workdir(self.box)
        words = make_words(about, folder, TASK_FILE)
        command = [self.program.word, *settings.words[1:]]
        env = {"PATH": self.program.path, **PROXIES, **make_environment(settings, about, words, ())}
        try:
            await self._place(about, words, folder)
            done = await self.sandbox.run(
                [fill(word, words) for word in command], read_stdin(settings, about), within_s, env=env, keeps_end=True
            )
        except SandboxEnded as error:
            return AgentExit(ENDED_FROM_OUTSIDE, f"its sandbox ended: {error}")
        except SandboxKilled as error:
            raise Unavailable(f"the agent's sandbox was lost: {error}") from error
        except OSError as error:
            return AgentExit(NOT_STARTED, f"{command[0]} cannot be started: {error}")
        output = done.stdout[-settings.output_chars :] if settings.output_chars else ""
        if done.stopped:
            return AgentExit(ENDED_FROM_OUTSIDE, f"{output}\n{done.stopped}")
        return AgentExit(NOT_STARTED if done.status is None else done.status, output)

    async def _place(self, about: Mapping[str, Any], words: Mapping[str, str], folder: str) -> None:
        """Puts the rollout's files in. Raises Unavailable."""
        try:
            await self.sandbox.put(TASK_FILE, json.dumps(about["task"]).encode())
            if self.settings.cwd is None and not self.settings.files:
                return
            async with work_folder(self.settings.cwd, self.reaper) as outside:
                write_files(self.settings, outside / "work", words)
                packed = await to_thread.run_sync(pack_state, outside / "work")
            await unpack_files(self.sandbox, packed, folder)
        except (StateError, OSError, SandboxEnded, SandboxKilled) as error:
            raise Unavailable(f"the files of the rollout cannot be put into its box: {error}") from error

    async def grade(self, settings: GradeSettings) -> Grade:
        """The grade of what the agent left. Raises Unavailable."""
        grade = resolve_grade(settings, Path.cwd(), None, "agent.grade")
        grader = Grader(grade, self.box, BubblewrapProvider(self.reaper))
        try:
            left = await self.sandbox.freeze()
        except SandboxKilled as error:
            raise Unavailable(f"nothing is left to grade: {error}") from error
        try:
            with anyio.fail_after(grader.limit_s):
                return await grader.grade(left)
        finally:
            await left.close()


@asynccontextmanager
async def open_box(
    settings: AgentSettings, box: AgentSandbox, program: Program, reaper: Reaper, socket_file: Path
) -> AsyncIterator[AgentBox]:
    """The box of a rollout, in which the endpoint's socket is handed over by the file. Raises Unavailable."""
    sized = box.model_copy(update={"output_bytes": max(1, BYTES_OF_A_CHARACTER * settings.output_chars)})
    sandbox = await BubblewrapProvider(reaper).start(
        sized, keeps_files=settings.grade is not None, readable=program.readable, sockets={PORT: str(socket_file)}
    )
    try:
        yield AgentBox(settings, box, program, sandbox, reaper)
    finally:
        with anyio.CancelScope(shield=True):
            await sandbox.stop()
