"""The tools `python`, `shell` and `files`: each rollout has one sandbox for all of them, started at its first call."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import Any, Self

import anyio
from anyio import to_thread

from gateway.config.entries import SandboxTool
from gateway.errors import Unavailable
from gateway.sandbox import sandbox_statistics as statistics
from gateway.sandbox.bubblewrap import can_mount_states
from gateway.sandbox.command_server import TOO_LONG
from gateway.sandbox.confined_process import (
    SandboxEnded,
    SandboxKilled,
    SandboxLate,
    answer_time_s,
    excuse_late_start,
)
from gateway.sandbox.grader import Grade, Grader
from gateway.sandbox.network_refusals import add_refusals
from gateway.sandbox.provider import Completed, FrozenFiles, Sandbox, SandboxProvider, opened
from gateway.sandbox.roots import find_workdir
from gateway.sandbox.sandbox_files import FILES_PARAMETERS, FILES_TEXT, FileProblem, run_files
from gateway.sandbox.sandbox_layout import ROLLOUT
from gateway.sandbox.sandbox_settings import SandboxSettings
from gateway.sandbox.sandbox_state import SandboxStates
from gateway.sandbox.spare_sandboxes import SpareSandboxes
from gateway.schema import parse_arguments
from gateway.state.prepared_state import PreparedStates
from gateway.toolset import PLANTED, Session, unknown_tool_result
from gateway.types import DEFAULT_CONTEXT, EMPTY, Context, Image, Outcome, Task, Text, ToolCall, ToolResult, ToolSpec

log = logging.getLogger(__name__)

MAX_TIME_S, SPARE_S = 3600.0, 30.0
MARGIN_S, MARGIN_SHARE = 3.0, 0.3
"""Code ends this long before its call's deadline, or this share of the time before it, so that the policy gets what it
printed, and its endless loop is its own error rather than a timeout of the infrastructure."""
GRADE = "grade"
"""The name of the grader's reward."""
LOST = "The variables of earlier calls are lost."
NEW_SANDBOX = "The next call gets a new sandbox, without the files and variables of earlier calls."
SPECS: Mapping[SandboxTool, tuple[str, str, str]] = {
    "python": (
        "Runs Python code and returns what it prints, and the value of its last line. Variables, imports and files stay"
        " for the next call. Figures of matplotlib come back as images.",
        "code",
        "The code.",
    ),
    "shell": (
        "Runs a shell command in the folder /rollout and returns what it prints. Files stay for the next call; the"
        " working folder and variables of the shell do not.",
        "command",
        "The command line, for bash.",
    ),
}


def tool_spec(name: SandboxTool, owner: str, hosts: Sequence[str] = (), workdir: str = ROLLOUT) -> ToolSpec:
    """The spec of a tool, with the hosts that it reaches and the folder in which it works."""
    if name == "files":
        return ToolSpec(name, FILES_TEXT.replace(ROLLOUT, workdir), FILES_PARAMETERS, owner=owner)
    text, parameter, description = SPECS[name]
    text = text.replace(ROLLOUT, workdir)
    network = f"Of the Internet, it reaches {', '.join(hosts)}" if hosts else "There is no access to the Internet"
    properties = {parameter: {"type": "string", "description": description}}
    text = f"{text} {network}."
    return ToolSpec(name, text, {"type": "object", "properties": properties, "required": [parameter]}, owner=owner)


class SandboxToolset:
    """Tools that work in a sandbox of the rollout."""

    def __init__(
        self, names: Sequence[SandboxTool], settings: SandboxSettings, provider: SandboxProvider, owner: str = ""
    ) -> None:
        workdir = find_workdir(settings)
        self.specs: Sequence[ToolSpec] = tuple(tool_spec(name, owner, settings.hosts, workdir) for name in names)
        self.settings, self.provider = settings, provider
        self.states: SandboxStates | None = None
        """What sandboxes begin from."""
        self.grader: Grader | None = None
        """What gives the reward, from what a rollout left."""
        self.reward = GRADE
        """The reward's name."""
        self.warm = 0
        """How many sandboxes are started in advance."""
        self.spares: SpareSandboxes | None = None
        self._stack = AsyncExitStack()

    @property
    def finish_s(self) -> float:
        """How long the end of a session may take."""
        return 0.0 if self.grader is None else self.grader.limit_s

    @property
    def prepared_states(self) -> PreparedStates | None:
        """The prepared states that rollouts may name."""
        return None if self.states is None else self.states.prepared

    async def __aenter__(self) -> Self:
        if self.warm:
            self.spares = SpareSandboxes(self._start_spare, self.warm)
            tasks = await self._stack.enter_async_context(anyio.create_task_group())
            self._stack.callback(tasks.cancel_scope.cancel)
            tasks.start_soon(self.spares.run)
        return self

    async def __aexit__(self, *_: object) -> None:
        """Stops the spare sandboxes; others end with their sessions."""
        self.spares = None
        await self._stack.aclose()

    async def take(self, state: str, left: FrozenFiles | None = None) -> Sandbox:
        """A sandbox for a rollout that begins from a state, without a name from the default; or goes on from files."""
        if left is not None:
            return await self.provider.start(self.settings, keeps_files=True, files_of=left)
        spare = await self.spares.take() if self.spares is not None and not state else None
        return spare or await self.start(state)

    async def start(self, state_name: str) -> Sandbox:
        """A new sandbox with its state; one that could not be given it is stopped, so that no call meets it empty."""
        states, provider = self.states, self.provider
        state = None if states is None else states.prepared.find_resolved(state_name)
        can_mount = provider.mounts_states and not self.settings.root
        is_mounted = state is not None and can_mount and await to_thread.run_sync(can_mount_states)
        sandbox = await provider.start(
            self.settings, state if is_mounted else None, keeps_files=self.grader is not None
        )
        async with _stopped_on_error(sandbox):
            if states is not None and state is not None and not is_mounted:
                await states.put(sandbox, state)
        return sandbox

    async def _start_spare(self) -> Sandbox:
        """A sandbox with the default state whose Python is running, if there is a tool for it."""
        sandbox = await self.start("")
        async with _stopped_on_error(sandbox):
            if any(spec.name == "python" for spec in self.specs):
                await sandbox.run_python("", SPARE_S)
        return sandbox

    @asynccontextmanager
    async def open(self, task: Task) -> AsyncIterator[Session]:
        if self.states is not None:
            self.states.prepared.check(task, self.specs[0].owner)
        session = SandboxSession(self, task.state)
        try:
            yield session
        finally:
            await session.close()


@asynccontextmanager
async def _stopped_on_error(sandbox: Sandbox) -> AsyncIterator[None]:
    """A block that prepares a sandbox; raises Unavailable if it ends meanwhile."""
    try:
        yield
    except BaseException as error:
        with anyio.CancelScope(shield=True):
            await sandbox.stop()
        if isinstance(error, SandboxEnded | SandboxKilled | OSError):
            raise Unavailable(f"a sandbox ended at its start: {error}") from error
        raise


class SandboxSession:
    """One rollout's sandbox."""

    __slots__ = ("_ended", "_left", "_lock", "_lost", "_sandbox", "_state", "_toolset", "_used")

    def __init__(self, toolset: SandboxToolset, state: str) -> None:
        self._toolset, self._state = toolset, state
        self._sandbox: Sandbox | None = None
        self._left: list[FrozenFiles] = []
        """What its sandboxes left, each time that it was graded."""
        self._ended = ""
        """Why it left nothing, if it was ended."""
        self._used: Sandbox | None = None
        """The one that has answered."""
        self._lost = ""
        """Why it is gone, if its files were lost with it by no doing of the policy's: none takes its place."""
        self._lock = anyio.Lock()

    @property
    def specs(self) -> Sequence[ToolSpec]:
        return self._toolset.specs

    async def call(self, call: ToolCall, context: Context = DEFAULT_CONTEXT) -> ToolResult:
        if call.name not in {spec.name for spec in self.specs}:
            return unknown_tool_result(call.name, self.specs)
        arguments, started_at = parse_arguments(call.arguments), time.monotonic()
        try:
            sandbox = await self.get_sandbox()
            started_at = time.monotonic()
            with anyio.move_on_after(answer_time_s()):
                result = await self._ask(sandbox, call.name, arguments)
                return excuse_late_start(result, started_at) if result.reason == TOO_LONG else result
            await sandbox.end()
            raise SandboxLate
        except (SandboxKilled, Unavailable) as error:
            log.error("tool %s: %s", call.name, error)
            outcome = Outcome.UNKNOWN if isinstance(error, SandboxKilled) else Outcome.UNAVAILABLE
            return ToolResult((Text("The tool is not available."),), outcome, reason=str(error))
        except SandboxEnded as error:
            text = f"The sandbox was ended: {error}. {NEW_SANDBOX}"
            result = ToolResult((Text(text),), Outcome.ERROR, reason=f"the sandbox was ended: {error}")
            return excuse_late_start(result, started_at) if isinstance(error, SandboxLate) else result
        except (OSError, FileProblem) as error:
            return ToolResult((Text(f"Error: {error}"),), Outcome.ERROR, reason=str(error))

    async def _ask(self, sandbox: Sandbox, name: str, arguments: Mapping[str, Any]) -> ToolResult:
        try:
            return await _ask(sandbox, name, arguments)
        except (SandboxKilled, Unavailable) as error:
            if sandbox is self._used or isinstance(error, SandboxKilled):
                self._lost = str(error)
            raise
        finally:
            self._used = sandbox

    async def get_sandbox(self) -> Sandbox:
        """The rollout's sandbox; a new one if the policy ended the last. Raises Unavailable."""
        async with self._lock:
            if self._lost:
                raise Unavailable(f"its sandbox was lost with its files: {self._lost}")
            if self._sandbox is None or not self._sandbox.alive:
                sandbox, self._sandbox = self._sandbox, None
                if sandbox is not None:
                    await sandbox.stop()
                self._sandbox = await self._toolset.take(self._state, self._left[-1] if self._left else None)
            return self._sandbox

    async def finish(self) -> Mapping[str, float]:
        """The grader's reward, and no other: what scores is not within reach of what is scored. Raises Unavailable."""
        grader, name = self._toolset.grader, self._toolset.reward
        if grader is None:
            return EMPTY
        grade = await self.grade(grader)
        return {name: grade.reward, f"{name}{PLANTED}": float(grade.is_planted)}

    @property
    def has_left(self) -> bool:
        """Whether a new sandbox goes on with the files of an earlier one."""
        return bool(self._left)

    async def keep_files(self) -> None:
        """Ends its processes, and keeps the files that they left, with which a later call goes on. Raises SandboxEnded,
        SandboxKilled and Unavailable."""
        sandbox, self._sandbox = self._sandbox, None
        if sandbox is not None:
            self._left.append(await sandbox.freeze())

    async def grade(self, grader: Grader) -> Grade:
        """Grades the files that its processes, which it ends, have left."""
        if self._lost:
            raise Unavailable(f"nothing is left to grade: {self._lost}")
        try:
            await self.keep_files()
        except SandboxEnded as error:
            log.warning("nothing is left to grade: %s", error)
            self._ended = str(error)
            statistics.STATISTICS.grades["ended"] += 1
            return Grade(0.0, {}, f"ended: {error}")
        except (SandboxKilled, Unavailable) as error:
            self._lost = str(error)
            raise Unavailable(f"nothing is left to grade: {error}") from error
        return await grader.grade(self._left[-1] if self._left else None)

    async def hash_state(self) -> str | None:
        """The hash of what the calls have left in `/rollout`."""
        states, toolset = self._toolset.states, self._toolset
        if states is not None and self._ended:
            return f"not packed: {self._ended}"
        if states is None or not self._left:
            return None if states is None else await states.hash(self._sandbox, self._state)
        async with opened(toolset.provider, toolset.settings, self._left[-1]) as box:
            return await states.hash(box, self._state)

    async def close(self) -> None:
        sandbox, self._sandbox, left, self._left = self._sandbox, None, self._left, []
        if sandbox is not None:
            await sandbox.stop()
        for files in reversed(left):
            await files.close()


async def _ask(sandbox: Sandbox, name: str, arguments: Mapping[str, Any]) -> ToolResult:
    if name == "files":
        return ToolResult((Text(await run_files(sandbox, arguments)),))
    if name == "python":
        done = await sandbox.run_python(str(arguments["code"]), _time_left_s())
        return add_refusals(_python_result(done), done.refusals)
    words = ("/bin/sh", "-c", 'exec "$@" 2>&1', "sh", "bash", "-c", str(arguments["command"]))
    done = await sandbox.run(words, b"", _time_left_s())
    return add_refusals(_shell_result(done), done.refusals)


def _time_left_s() -> float:
    """How long code may run, so that its end is told before the call's deadline."""
    left_s = anyio.current_effective_deadline() - anyio.current_time()
    return max(0.05, min(MAX_TIME_S, left_s - min(MARGIN_S, MARGIN_SHARE * left_s)))


def _python_result(done: Completed) -> ToolResult:
    texts = [done.stdout, done.stderr]
    if done.stopped:
        texts.append(f"The code was stopped: {done.stopped}.{f' {LOST}' if done.is_lost else ''}")
    reason = done.stopped or (done.stderr.strip().splitlines() or [""])[-1]
    result = _text_result(texts, reason, is_error=bool(done.stopped or done.stderr))
    return replace(result, parts=(*result.parts, *(Image(data) for data in done.images)))


def _shell_result(done: Completed) -> ToolResult:
    """A status other than 0 is told; it is a value in shell, such as that of `grep`, and no error of the call."""
    if done.stopped:
        return _text_result([done.stdout, f"The command was stopped: {done.stopped}."], done.stopped, is_error=True)
    return _text_result([done.stdout, f"[exit status {done.status}]" if done.status else ""], "", is_error=False)


def _text_result(texts: Sequence[str], reason: str, *, is_error: bool) -> ToolResult:
    text = "\n".join(text.rstrip("\n") for text in texts if text) or "[no output]"
    outcome = Outcome.ERROR if is_error else Outcome.OK
    return ToolResult((Text(text),), outcome, reason=reason if is_error else None)
