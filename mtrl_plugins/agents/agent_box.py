"""The box of a rollout in which its agent runs: a sandbox with the endpoint of its session, and nothing else outside.

The grader judges what the agent left in it.
"""

from __future__ import annotations

import json
import logging
import math
import os
import shutil
import tarfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol, cast, runtime_checkable

import anyio
from anyio import to_thread

from gateway.errors import ConfigError, Unavailable
from gateway.process.reaper import Reaper
from gateway.sandbox.choose_provider import find_provider_problem
from gateway.sandbox.command_server import TOO_LONG
from gateway.sandbox.confined_process import SandboxEnded, SandboxKilled
from gateway.sandbox.grade_settings import resolve_grade
from gateway.sandbox.grader import Grader
from gateway.sandbox.program_paths import (
    MOST_PROGRAMS,
    find_installation,
    find_interpreters,
    is_of_system,
    read_interpreters,
)
from gateway.sandbox.provider import BubblewrapProvider, FrozenFiles, LocalSandbox, Sandbox
from gateway.sandbox.roots import find_root, find_workdir, resolve_inside
from gateway.sandbox.sandbox_environment import ENVIRONMENT
from gateway.sandbox.sandbox_paths import resolve_paths
from gateway.sandbox.sandbox_settings import PATHS, SandboxSettings
from gateway.sandbox.sandbox_state import MAX_BYTES, pack_state, unpack_files
from gateway.sandbox.sandbox_toolset import GRADE, SandboxSession, SandboxToolset
from gateway.session import AnySession
from gateway.state.prepared_state import StateError
from gateway.toolset import PLANTED
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
from trainer.rollout.rollout import COUNTS_INFO
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


def find_program(settings: AgentSettings, box: SandboxSettings, tools: Sequence[str] = ()) -> Program:
    """Finds the program as it will be seen inside; raises ConfigError with the name of what is not, or for a task with
    `tools` that the program is not told of."""
    if tools and not settings.takes_tools:
        remedy = "name `{mcp_url}` in its `files`, as a server over streamable HTTP, or in its `command` or `env`"
        raise ConfigError(f"the agent is not told of the tools {', '.join(tools):.200}", field="agent", remedy=remedy)
    word, search = settings.words[0], settings.env.get("PATH")
    root = find_root(box.root).files if box.root else None
    inside = find_root(box.root).image["env"].get("PATH", "") if box.root else ""
    folders = (inside or ENVIRONMENT["PATH"]).split(":")
    named = [argument for argument in settings.words[1:] if "{" not in argument and os.path.isabs(argument)]
    files = tuple(filter(os.path.isfile, named))
    is_own = "{" in word or word.removeprefix("./") in settings.files or ("/" in word and not os.path.isabs(word))
    if is_own:
        return Program(word, files, ":".join(folders))
    if root is not None and (inside_root := _find_inside(root, word, folders, box)) is not None:
        if missing := _find_missing(root, inside_root, folders, box):
            raise _not_inside(missing, box, f", which {word} needs")
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


def _find_inside(root: Path, word: str, folders: Sequence[str], box: SandboxSettings) -> Path | None:
    """The executable file that a word means in a root."""
    for place in [word] if "/" in word else [f"{folder}/{word}" for folder in folders]:
        is_shown = any(map(Path(place).is_relative_to, (*box.readable, *box.writable)))
        with suppress(ValueError, OSError):
            file = Path(place) if is_shown else resolve_inside(root, place.split("/"))
            if file.is_file() and os.access(file, os.X_OK):
                return file
    return None


def _find_missing(root: Path, program: Path, folders: Sequence[str], box: SandboxSettings) -> str:
    """The interpreter that a program of a root needs and the root has not; empty if it has all."""
    file = program
    for _ in range(MOST_PROGRAMS):
        for word in read_interpreters(file):
            found = _find_inside(root, word, folders, box)
            if found is None:
                return word
            file = found
    return ""


def _is_seen(root: Path, program: Path, box: SandboxSettings) -> bool:
    """Whether a program of this machine runs in a root: its installation is shown there, the system's is not."""
    hidden = [place for place in (program, program.resolve()) if is_of_system(place)]
    hidden = [place for place in hidden if not any(map(place.is_relative_to, box.readable))]
    return all(_find_inside(root, str(place), (), box) is not None for place in hidden)


def _not_inside(program: str, box: SandboxSettings, why: str) -> ConfigError:
    where, remedy = "there is", "name an installed program, or its whole path"
    if box.root:
        where = f"the root {box.root!r} has"
        remedy = "install it in the image, or name its folder in the sandbox's `readable`"
    return ConfigError(f"{where} no program {program!r}{why}", field="agent.command", remedy=remedy)


def box_of_task(box: AgentSandbox, task: Task) -> AgentSandbox:
    """The settings with the root that the row names."""
    root = task.columns.get(box.root_column) if box.root_column else None
    return box if root is None else box.model_copy(update={"root": str(root)})


@runtime_checkable
class BoxedTask(Protocol):
    """A task that is played in boxes of its own: a row's, or one of an environment, whose session is this."""

    tools: SandboxToolset
    """How the boxes are started, and by whom."""
    agent_folder: str
    """Where the files of an agent are put."""
    left_s: float
    """What is left of the time that the task gives."""

    async def get_box(self) -> Sandbox:
        """The box. Raises Unavailable."""
        ...

    async def begin(self) -> str | None:
        """What is asked, if it is something else than the row says. Raises Unavailable."""
        ...

    async def end(self, *, is_last: bool) -> TaskGrade:
        """Grades what is in the box; `is_last`: nothing further is played. Raises Unavailable."""
        ...


class TaskGrade(NamedTuple):
    """What a task, or a step of it, was worth."""

    rewards: Mapping[str, float]
    infos: Mapping[str, Any]
    question: str | None = None
    """What is asked next, if it goes on."""


class RowTask:
    """The task of a row, in a sandbox that `agent.grade` grades."""

    left_s = math.inf

    def __init__(self, settings: AgentSettings, box: AgentSandbox, reaper: Reaper) -> None:
        provider = BubblewrapProvider(reaper)
        self.tools, self._grade = SandboxToolset((), box, provider), settings.grade
        if settings.grade is not None:
            self.tools.grader = Grader(resolve_grade(settings.grade, Path.cwd(), None, "agent.grade"), box, provider)
        self.agent_folder = find_workdir(box)
        self._session = SandboxSession(self.tools, "")
        self.get_box, self.close = self._session.get_sandbox, self._session.close

    async def begin(self) -> None:
        """What the row says is asked."""

    async def end(self, *, is_last: bool) -> TaskGrade:
        """The grade. Raises Unavailable."""
        if (grader := self.tools.grader) is None:
            return TaskGrade({}, {})
        with anyio.fail_after(grader.limit_s):
            grade = await self._session.grade(grader)
        counts = {f"{GRADE}{PLANTED}": float(grade.is_planted)}
        return TaskGrade({GRADE: grade.reward}, {COUNTS_INFO: counts, "agent_grade": grade.problem})


def find_boxed_task(session: AnySession) -> BoxedTask | None:
    """The environment's session, if its task is played in boxes of its own."""
    sessions: Mapping[int, Any] = getattr(session, "source_sessions", {})
    return next((each for each in sessions.values() if isinstance(each, BoxedTask)), None)


@dataclass(slots=True)
class EndpointProvider:
    """Starts the boxes of a rollout: its agent's program is seen in each, and its endpoint is served there."""

    settings: AgentSettings
    program: Program
    provider: BubblewrapProvider
    hand_over: Callable[[], Path]
    """Serves the endpoint in one more box, which gives its listening socket by this file."""
    mounts_states: bool = True

    async def start(
        self,
        settings: SandboxSettings,
        state: Path | None = None,
        *,
        keeps_files: bool = False,
        files_of: FrozenFiles | None = None,
    ) -> LocalSandbox:
        output = {"output_bytes": max(1, BYTES_OF_A_CHARACTER * self.settings.output_chars)}
        return await self.provider.start(
            settings.model_copy(update=output),
            state,
            keeps_files=keeps_files,
            files_of=files_of,
            readable=self.program.readable,
            sockets={PORT: str(self.hand_over())},
        )


@dataclass(frozen=True, slots=True)
class AgentBox:
    """The box of one rollout."""

    settings: AgentSettings
    program: Program
    task: BoxedTask
    reaper: Reaper

    async def run(self, about: Mapping[str, Any], within_s: float) -> AgentExit:
        """Runs the program to its end, or until the task's time is over; cancelling it ends it with all that it
        started. Raises Unavailable."""
        settings, folder = self.settings, self.task.agent_folder
        words = make_words(about, folder, TASK_FILE)
        command = [fill(word, words) for word in (self.program.word, *settings.words[1:])]
        env = {"PATH": self.program.path, **PROXIES, **make_environment(settings, about, words, ())}
        stdin, limit_s = read_stdin(settings, about), min(within_s, self.task.left_s)
        try:
            sandbox = cast(LocalSandbox, await self.task.get_box())
            await self._place(sandbox, about, words, folder)
            done = await sandbox.run(command, stdin, limit_s, env=env, keeps_end=True, grace_s=settings.stop_s)
        except SandboxEnded as error:
            return AgentExit(ENDED_FROM_OUTSIDE, f"its sandbox ended: {error}")
        except SandboxKilled as error:
            raise Unavailable(f"the agent's sandbox was lost: {error}") from error
        except OSError as error:
            return AgentExit(NOT_STARTED, f"{self.program.word} cannot be started: {error}")
        output = done.stdout[-settings.output_chars :] if settings.output_chars else ""
        if done.stopped:
            is_late = done.stopped == TOO_LONG and limit_s < within_s
            return AgentExit(ENDED_FROM_OUTSIDE, f"{output}\n{done.stopped}", is_late)
        return AgentExit(NOT_STARTED if done.status is None else done.status, output)

    async def _place(self, sandbox: Sandbox, about: Mapping[str, Any], words: Mapping[str, str], folder: str) -> None:
        """Puts the rollout's files in. Raises Unavailable."""
        try:
            await sandbox.put(TASK_FILE, json.dumps(about["task"]).encode())
            if self.settings.cwd is None and not self.settings.files:
                return
            async with work_folder(self.settings.cwd, self.reaper) as outside:
                write_files(self.settings, outside / "work", words)
                packed = await to_thread.run_sync(pack_state, outside / "work")
            await unpack_files(sandbox, packed, folder)
        except (StateError, OSError, SandboxEnded, SandboxKilled) as error:
            raise Unavailable(f"the files of the rollout cannot be put into its box: {error}") from error
