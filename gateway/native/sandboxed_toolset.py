"""The toolset of native tools with `isolation: sandbox`: each rollout has a process for each tool that it calls.

What comes out of a sandbox is data of whoever took it over: no reward, no end of the rollout, and no outcome that
would keep it from being scored is taken from there.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self
from uuid import uuid4

import anyio

from gateway.bounded_json import SMALL_LENGTH, loads
from gateway.errors import Unavailable
from gateway.large_json import run_beside
from gateway.native.agent_data import kwargs_by_method
from gateway.native.result_json import MAX_VALUES
from gateway.process.reaper import Reaper
from gateway.sandbox.bubblewrap import Confined, python_folders
from gateway.sandbox.confined_process import (
    ConfinedProcess,
    SandboxEnded,
    SandboxKilled,
    SandboxLate,
    answer_time_s,
    excuse_late_start,
)
from gateway.sandbox.network_refusals import add_refusals
from gateway.sandbox.sandbox_settings import SandboxSettings
from gateway.sandbox.sandbox_state import PACK_S, SandboxStates
from gateway.sandbox.sandboxed_command import open_command
from gateway.schema import parse_arguments
from gateway.state.prepared_state import PreparedStates
from gateway.toolset import Session, unknown_tool_result
from gateway.types import DEFAULT_CONTEXT, EMPTY, Context, Outcome, Task, Text, ToolCall, ToolResult, ToolSpec
from gateway.wire import dumps, part_from_json

log = logging.getLogger(__name__)

GATEWAY_FOLDER = Path(__file__).parents[1]
COMMAND = (sys.executable, "-B", "-m", "gateway.process.child_entry", "gateway.native.sandbox_worker:serve")
SENT_KWARGS = ("create_kwargs", "execute_kwargs", "release_kwargs")
MAX_REASON_BYTES = 200
PACK_REQUEST = dumps({"do": "pack"})
LOAD_S, RELEASE_S, MAX_CALL_S = 60.0, 10.0, 86_400.0
OUTCOMES = (Outcome.OK, Outcome.ERROR, Outcome.INVALID)
"""Outcomes that a sandbox may report. The others mean that the infrastructure failed, so that nothing is scored."""


@dataclass(frozen=True, slots=True)
class SandboxedTool:
    """A function or class that runs in a sandbox."""

    spec: ToolSpec
    start: Mapping[str, Any]
    """What its process needs to load it."""
    settings: SandboxSettings
    readable: tuple[str, ...]
    """Where its module is."""
    states: SandboxStates | None = None
    """What its working folder begins as, if it is to begin as something."""


def module_path(module_name: str) -> Path:
    """The file of a loaded module, or the folder of the package that it is in."""
    module = sys.modules[module_name.partition(".")[0]]
    folders = list(getattr(module, "__path__", ()))
    return Path(folders[0] if folders else module.__file__ or "").resolve()


class SandboxedToolset:
    """Native tools in sandboxes as a toolset."""

    def __init__(self, tools: Sequence[SandboxedTool], reaper: Reaper) -> None:
        self.tools = {tool.spec.name: tool for tool in tools}
        self.specs: Sequence[ToolSpec] = tuple(tool.spec for tool in tools)
        self.reaper = reaper

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        """Nothing to close: processes end with their sessions."""

    @asynccontextmanager
    async def open(self, task: Task) -> AsyncIterator[Session]:
        for tool in self.tools.values():
            if tool.states is not None:
                tool.states.prepared.check(task, tool.spec.owner)
        session = _SandboxedSession(self, task)
        try:
            yield session
        finally:
            await session.close()

    @property
    def prepared_states(self) -> PreparedStates | None:
        """The prepared states that rollouts may name: an entry has one tool."""
        return next((tool.states.prepared for tool in self.tools.values() if tool.states is not None), None)

    async def start(self, tool: SandboxedTool, kwargs: Mapping[str, Any], state_name: str = "") -> ConfinedProcess:
        """A process that has loaded the tool; raises Unavailable."""
        readable = (*python_folders(), str(GATEWAY_FOLDER), *tool.readable)
        env = {"PYTHONPATH": str(GATEWAY_FOLDER.parent)}
        state = None if tool.states is None else tool.states.prepared.find_resolved(state_name)
        confined = Confined(COMMAND, tool.settings, readable, env=env, state=str(state or ""), is_first_process=True)
        process = await ConfinedProcess.start(open_command(confined, self.reaper), self.reaper)
        try:
            await process.ask(dumps({**tool.start, "kwargs": dict(kwargs)}), LOAD_S)
        except (SandboxEnded, SandboxKilled) as error:
            raise Unavailable(f"tool {tool.spec.name!r} could not be loaded in its sandbox: {error}") from error
        return process


class _SandboxedSession:
    __slots__ = ("_locks", "_processes", "_task", "_toolset")

    def __init__(self, toolset: SandboxedToolset, task: Task) -> None:
        self._toolset, self._task = toolset, task
        self._processes: dict[str, ConfinedProcess] = {}
        self._locks = {name: anyio.Lock() for name in toolset.tools}

    @property
    def specs(self) -> Sequence[ToolSpec]:
        return self._toolset.specs

    async def call(self, call: ToolCall, context: Context = DEFAULT_CONTEXT) -> ToolResult:
        tool = self._toolset.tools.get(call.name)
        if tool is None:
            return unknown_tool_result(call.name, self.specs)
        message = {"arguments": parse_arguments(call.arguments), "name": call.name, "instance_id": str(uuid4())}
        try:
            process = await self._started(tool)
        except Unavailable as error:
            log.error("tool %s: %s", call.name, error)
            return ToolResult((Text("The tool is not available."),), Outcome.UNAVAILABLE, reason=str(error))
        started_at = time.monotonic()
        try:
            with anyio.move_on_after(answer_time_s()):
                result = await _read_result(await process.ask(dumps(message), MAX_CALL_S))
                return add_refusals(result, process.take_refusals())
            raise SandboxLate
        except SandboxKilled as error:
            log.error("tool %s: %s", call.name, error)
            return ToolResult((Text("The tool is not available."),), Outcome.UNKNOWN, reason=str(error))
        except SandboxEnded as error:
            await process.stop()
            text = f"The tool's sandbox was ended: {error}."
            result = ToolResult((Text(text),), Outcome.ERROR, reason=f"the sandbox was ended: {error}")
            return excuse_late_start(result, started_at) if isinstance(error, SandboxLate) else result

    async def _started(self, tool: SandboxedTool) -> ConfinedProcess:
        name = tool.spec.name
        async with self._locks[name]:
            process = self._processes.get(name)
            if process is None or not process.alive:
                if process is not None:
                    await process.stop()
                given = kwargs_by_method(self._task.create.get(name, {}))
                # Not what rewards are computed with: what runs inside could read it.
                kwargs = {key: given[key] for key in SENT_KWARGS if key in given and tool.start["is_class"]}
                process = self._processes[name] = await self._toolset.start(tool, kwargs, self._task.state)
            return process

    async def finish(self) -> Mapping[str, float]:
        """No rewards: what scores is not within reach of what is scored."""
        return EMPTY

    async def hash_state(self) -> str | None:
        """The hash of what its tool has left in `/rollout`, if that began as a prepared state."""
        tool = next((tool for tool in self._toolset.tools.values() if tool.states is not None), None)
        if tool is None or tool.states is None:
            return None
        process = self._processes.get(tool.spec.name)
        if process is None:
            return await tool.states.prepared.hash_prepared(self._task.state)
        try:
            packed = await process.ask(PACK_REQUEST, PACK_S)
        except SandboxKilled as error:
            raise Unavailable(f"the state at the end was lost: {error}") from error
        except SandboxEnded as error:
            return f"not packed: {error}"
        if packed.startswith(b"{"):  # An archive begins with the folder itself, which has no name in it.
            return f"not packed: {packed[:MAX_REASON_BYTES].decode('utf-8', 'replace')}"
        return await tool.states.hash_packed(packed)

    async def close(self) -> None:
        with anyio.CancelScope(shield=True):
            async with anyio.create_task_group() as tasks:
                for name, process in self._processes.items():
                    tasks.start_soon(self._close, self._toolset.tools[name], process)
            self._processes = {}

    async def _close(self, tool: SandboxedTool, process: ConfinedProcess) -> None:
        if tool.start["is_class"] and process.alive:
            with suppress(SandboxEnded, SandboxKilled):
                await process.ask(dumps({"do": "release"}), RELEASE_S)
        await process.stop()


async def _read_result(body: bytes) -> ToolResult:
    """The result in an answer, in which anything may be written."""
    try:
        value = json.loads(body) if len(body) <= SMALL_LENGTH else await run_beside(loads, body, MAX_VALUES)
        outcome = Outcome(value["outcome"])
        parts = tuple(part_from_json(part) for part in value["parts"])
        reason, metrics = value["reason"], value["metrics"]
        if not isinstance(metrics, dict) or not isinstance(reason, str | None):
            raise ValueError("not a valid result")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise SandboxEnded("its processes wrote an answer that cannot be read") from error
    if outcome not in OUTCOMES:
        outcome, reason = Outcome.ERROR, reason or outcome.value
    return ToolResult(parts, outcome, structured=value.get("structured"), metrics=metrics, reason=reason)
