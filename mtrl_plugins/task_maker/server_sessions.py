"""Fresh sessions on the server that tasks are made from: calls, results as values, and the state so far."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import anyio

from gateway.build import build_plan
from gateway.config.diagnostics import closest_match
from gateway.config.models import Server as ServerConfig
from gateway.config.rollout_variables import needs_folder
from gateway.errors import ConfigError, GatewayError, Unavailable, unwrap_error
from gateway.gateway import Gateway
from gateway.large_json import is_large
from gateway.plural import format_count
from gateway.state.state_hash import POLICY_PATH, has_hash_form
from gateway.types import Outcome, Task, ToolCall, ToolSpec
from mtrl_plugins.task_maker.values import Value, is_usable, parse_result, reports_error

T = TypeVar("T")
CALL_S = 60.0
MAX_RESULT = 100_000
"""Characters of a result, which is more than a policy reads."""
MAX_STRUCTURED = 10 * MAX_RESULT
"""Its size as values, each of which takes more than its characters."""
AT_ONCE = 8
"""Sessions that are open at the same time."""


async def run_concurrently(count: int, work: Callable[[int], Awaitable[T]]) -> list[T]:
    """The results of `work` for 0 to `count` - 1, some at the same time; the first error is raised as it is."""
    results: dict[int, T] = {}
    numbers = iter(range(count))

    async def run() -> None:
        for number in numbers:
            results[number] = await work(number)

    try:
        async with anyio.create_task_group() as tasks:
            for _ in range(min(AT_ONCE, count)):
                tasks.start_soon(run)
    except ExceptionGroup as group:
        raise unwrap_error(group) from group
    return [results[number] for number in range(count)]


class Dropped(Exception):
    """A chain that makes no task, and why."""


@dataclass(frozen=True, slots=True)
class CallResult:
    """How a call ended."""

    ok: bool
    value: Any
    text: str
    is_large: bool = False
    """Whether the call worked, and its result is too large for a task: reading it would take most of the time."""


class ServerSession:
    """One session in a fresh state."""

    def __init__(self, session: Any) -> None:
        self._session = session
        self._calls = 0

    async def call(self, tool: str, arguments: Mapping[str, Any]) -> CallResult:
        """Calls a tool. Raises ConfigError if the server is not there, and Dropped if an earlier call ended it."""
        self._calls += 1
        call = ToolCall(f"call_{self._calls}", tool, json.dumps(arguments))
        result = None
        with anyio.move_on_after(CALL_S):
            result = await self._session.call(call)
        if result is None:
            return CallResult(False, None, "")
        if result.outcome is Outcome.UNAVAILABLE and self._calls > 1:
            raise Dropped("a call ended the server")
        if result.outcome is Outcome.UNAVAILABLE:
            raise ConfigError(f"the server cannot be used: {result.reason}", remedy="correct its entry")
        if len(result.text) > MAX_RESULT or is_large(result.structured, MAX_STRUCTURED):
            return CallResult(False, None, "", is_large=True)
        value = parse_result(result.text, result.structured)
        return CallResult(result.outcome is Outcome.OK and not reports_error(value), value, result.text)

    async def state(self) -> Mapping[str, str]:
        """The hashes of the state as it is now; empty for a server without a folder."""
        try:
            states: Mapping[str, str] = await self._session.hash_states()
        except Unavailable as error:
            raise Dropped("the state could not be read") from error
        if any(not has_hash_form(state) for state in states.values()):
            raise Dropped("the state is too large to compare")
        return states


@dataclass(frozen=True)
class Server:
    """The server, which begins anew in each session."""

    gateway: Any
    name: str
    specs: Mapping[str, ToolSpec]
    has_folder: bool
    """Whether its state is in a folder, which can be compared."""
    states: tuple[str, ...] = ("",)
    """The names of the states that its tasks begin from."""
    files: Mapping[str, tuple[Value, ...]] = field(default_factory=dict)
    """The paths of the files in each of them."""
    is_prepared: bool = True
    """Whether its states have something in them."""

    @asynccontextmanager
    async def open(self, state: str) -> AsyncIterator[ServerSession]:
        """A session in a fresh state; raises ConfigError if there is none."""
        task = Task("make-tasks", tools=tuple(self.specs), state=state)
        try:
            async with self.gateway.open(task) as session:
                yield ServerSession(session)
        except GatewayError as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(
                f"server {self.name!r}: {error}", remedy="correct its entry in the servers file"
            ) from error


MAX_PATHS = 500

RESET_REMEDY = (
    'write `"isolation": "process"` (or `sandbox`), and `${MTRL_ROLLOUT_DIR}` where the server keeps its files, so that'
    " each rollout starts it anew"
)


@asynccontextmanager
async def open_server(mcp: Path, name: str, state: str | None, tools: tuple[str, ...]) -> AsyncIterator[Server]:
    """The server of a servers file. Raises ConfigError with what to do where tasks cannot be made from it."""
    plan = build_plan(None, mcp)
    source = next((source for source in plan.sources if source.name == name), None)
    if source is None:
        remedy = f"its servers are: {', '.join(plan.config.servers) or 'none'}"
        raise ConfigError(f"there is no server {name!r}", file=mcp, field="--server", remedy=remedy)
    backend: Any = source.backend
    config: ServerConfig = backend.config
    if config.isolation not in ("process", "sandbox"):
        problem = f"its state cannot be reset: all rollouts use one process (`isolation: {config.isolation}`)"
        raise ConfigError(problem, file=mcp, field=f"mcpServers.{name}.isolation", remedy=RESET_REMEDY)
    async with Gateway([source], services=plan.services) as gateway:
        status = backend.status
        if status.state != "up":
            problem = f"server {name!r} is down: {status.reason or status.state}"
            raise ConfigError(problem, file=mcp, remedy="see `mtrl-gateway check`")
        specs = {spec.name: spec for spec in gateway.specs if spec.audience == "policy"}
        _check_tools(tools, specs, status.quarantined)
        chosen = {key: spec for key, spec in specs.items() if not tools or key in tools}
        if not chosen:
            reasons = "".join(f"; {tool}: {reason}" for tool, reason in status.quarantined.items())
            remedy = "correct these tools" if reasons else "see `mtrl-gateway list`"
            raise ConfigError(f"server {name!r} offers no tools{reasons}", file=mcp, remedy=remedy)
        states = _states(backend.prepared_states.names() if config.states is not None else (), state)
        has_folder = needs_folder(config)
        files = {one: tuple(_paths(backend.prepared_states.find(one))) for one in states} if has_folder else {}
        is_prepared = config.state is not None or config.states is not None
        yield Server(gateway, name, chosen, has_folder, states, files, is_prepared)


def describe_server(server: Server) -> str:
    """What tasks can be made from, and what limits them."""
    text = f"server {server.name}: {format_count(len(server.specs), 'tool')}"
    if not server.has_folder:
        return (
            f"{text}; its entry has no ${{MTRL_ROLLOUT_DIR}}, so that its state cannot be compared: only answers are"
            " graded, and what its tools change does not count"
        )
    if server.states == ("",) and not server.is_prepared:
        return f"{text}; every task begins with an empty folder, since its entry has no `state`"
    return f"{text}, {format_count(len(server.states), 'prepared state')}"


def _paths(folder: Path | None) -> Iterator[Value]:
    """The paths in a prepared folder as the policy knows them; none of an archive."""
    if folder is None or not folder.is_dir():
        return
    for path in islice(sorted(folder.rglob("*")), MAX_PATHS):
        inside = path.relative_to(folder)
        if is_usable(str(inside)) and not any(part.startswith(".") for part in inside.parts):
            yield Value(f"{POLICY_PATH}/{inside.as_posix()}", "directory" if path.is_dir() else "file")
            yield Value(inside.as_posix(), "relative_directory" if path.is_dir() else "relative_file")


def _check_tools(tools: tuple[str, ...], specs: Mapping[str, Any], unusable: Mapping[str, str]) -> None:
    for tool in tools:
        if tool in unusable and tool not in specs:
            problem = f"the tool {tool!r} cannot be offered: {unusable[tool]}"
            raise ConfigError(problem, field="--tool", remedy="correct it in the server")
        if tool not in specs:
            close = closest_match(tool, list(specs))
            remedy = f"did you mean {close!r}?" if close else f"it offers: {', '.join(specs)}"
            raise ConfigError(f"the server has no tool {tool!r}", field="--tool", remedy=remedy)


def _states(names: tuple[str, ...], state: str | None) -> tuple[str, ...]:
    if state is None:
        return names or ("",)
    if state not in names:
        close = closest_match(state, list(names))
        known = f"there are: {', '.join(names)}" if names else "give the server a folder of them with `states`"
        remedy = f"did you mean {close!r}?" if close else known
        raise ConfigError(f"the server has no state {state!r}", field="--state", remedy=remedy)
    return (state,)


def read_examples(file: Path | None) -> dict[str, list[Mapping[str, Any]]]:
    """Examples of arguments by tool, from lines of {"tool": ..., "arguments": {...}}."""
    examples: dict[str, list[Mapping[str, Any]]] = {}
    for number, line in enumerate([] if file is None else _lines(file), 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
            tool, arguments = value["tool"], value["arguments"]
            if not isinstance(tool, str) or not isinstance(arguments, dict):
                raise TypeError("`tool` is a text and `arguments` an object")
        except (ValueError, KeyError, TypeError) as error:
            remedy = 'write {"tool": "read_query", "arguments": {"query": "SELECT ..."}}'
            raise ConfigError(f"is no example: {error}", file=f"{file}:{number}", remedy=remedy) from error
        examples.setdefault(tool, []).append(arguments)
    return examples


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"cannot be read: {error}", file=file, field="--examples") from error
