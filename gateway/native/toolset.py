"""Native tools are a toolset: functions are called, classes live as long as the rollout does."""

from __future__ import annotations

import inspect
import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import lru_cache
from types import TracebackType
from typing import Any, NamedTuple, Self
from uuid import uuid4

import anyio

from gateway.errors import SessionError, told
from gateway.native.answer import answer, failure, is_slow
from gateway.native.base import BaseTool, ToolResponse
from gateway.native.function import FunctionTool, SessionContext
from gateway.native.thread import Threads
from gateway.schema import parse_object
from gateway.toolset import Session, missing
from gateway.types import ALONE, Context, Hints, Outcome, Part, Task, Text, ToolCall, ToolResult, ToolSpec
from gateway.verl.agent import AgentData, by_method, hears

log = logging.getLogger(__name__)

CREATE_S = 60.0
"""Deadline of one `create`."""
LAST_S = 25.0
"""Deadline of all `calc_reward` of a rollout, and then of all `release`: shorter than a session waits at its end."""


class ClassTool:
    """A `BaseTool` object with its spec."""

    def __init__(self, tool: BaseTool, *, owner: str = "", hints: Hints | None = None) -> None:
        self.tool = tool
        function = tool.tool_schema.function
        self.spec = ToolSpec(
            name=function.name,
            description=function.description,
            parameters=function.parameters,
            hints=hints or Hints(),
            owner=owner,
        )


NativeTool = FunctionTool | ClassTool


class NativeToolset:
    def __init__(self, tools: Sequence[NativeTool]) -> None:
        self.tools = {tool.spec.name: tool for tool in tools}
        self.specs: Sequence[ToolSpec] = tuple(tool.spec for tool in tools)
        self.threads = Threads()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    @asynccontextmanager
    async def open(self, task: Task) -> AsyncIterator[Session]:
        session = _NativeSession(self, task)
        try:
            await session.create()
            yield session
        finally:
            await session.release()


class _Instance(NamedTuple):
    tool: BaseTool
    id: str
    given: Mapping[str, Any]
    """Keyword arguments by method, as rows written for verl have them: `execute_kwargs`, and so on."""

    def kwargs(self, method: str) -> dict[str, Any]:
        return dict(self.given.get(f"{method}_kwargs") or {})


class _NativeSession:
    __slots__ = ("_agent", "_context", "_instances", "_said", "_task", "_toolset")

    def __init__(self, toolset: NativeToolset, task: Task) -> None:
        self._toolset, self._task = toolset, task
        self._instances: dict[str, _Instance] = {}
        self._said: dict[str, tuple[Part, ...]] = {}
        """By tool, what its `create` answered; it is read with the first result of that tool."""
        self._context: SessionContext | None = None
        self._agent: AgentData | None = None

    @property
    def specs(self) -> Sequence[ToolSpec]:
        return self._toolset.specs

    async def create(self) -> None:
        for name, tool in self._toolset.tools.items():
            if isinstance(tool, ClassTool) and (self._task.tools is None or name in self._task.tools):
                await self._create(name, tool.tool)

    async def _create(self, name: str, tool: BaseTool) -> None:
        """The instance's name is ours from the start, so that a `create` which breaks half-way is released too."""
        instance_id = str(uuid4())
        self._instances[name] = instance = _Instance(tool, instance_id, by_method(self._task.create.get(name, {})))
        given = instance.kwargs("create")
        kwargs = accepted(tool.create, given | {"create_kwargs": given})
        try:
            with anyio.fail_after(CREATE_S):
                made = await self._toolset.threads.run(tool.create, instance_id, **kwargs)
                if isinstance(made, tuple) and isinstance(made[-1], ToolResponse) and not made[-1].is_empty():
                    self._said[name] = (await self._answer(made[-1])).parts
        except Exception as error:  # user code: whatever it raises, the session cannot open
            raise SessionError(f"tool {name!r} could not create its instance: {told(error)}") from error
        own_id = made[0] if isinstance(made, tuple) else made
        self._instances[name] = instance._replace(id=own_id if isinstance(own_id, str) else instance_id)

    async def call(self, call: ToolCall, context: Context = ALONE) -> ToolResult:
        tool = self._toolset.tools.get(call.name)
        if tool is None:
            return missing(call.name, self.specs)
        arguments = parse_object(call.arguments)
        try:
            if isinstance(tool, FunctionTool):
                return await self._call_function(tool, arguments, context)
            instance = self._instances[call.name]
            execute, kwargs = tool.tool.execute, self._beside(tool.tool) | instance.kwargs("execute")
            result = await self._answer(await self._toolset.threads.run(execute, instance.id, arguments, **kwargs))
            said = self._said.pop(call.name, ())
            return replace(result, parts=(*said, *result.parts)) if said else result
        except Exception as error:  # user code: its exceptions are results
            return failure(call.name, error)

    def _beside(self, tool: BaseTool) -> dict[str, Any]:
        """What classes written for verl are told of the rollout, where their `execute` has room for it."""
        if not hears(tool):
            return {}
        self._agent = self._agent or AgentData(self._task)
        return accepted(tool.execute, {"agent_data": self._agent})

    async def _call_function(self, tool: FunctionTool, arguments: dict[str, Any], context: Context) -> ToolResult:
        try:
            kwargs = tool.bind(arguments)
        except ValueError as error:
            return ToolResult((Text(str(error)),), Outcome.INVALID, reason="arguments do not fit the function")
        if tool.context_name is not None:
            kwargs[tool.context_name] = self._seen_by(context)
        if tool.is_async:
            return await self._answer(await tool.function(**kwargs))
        return await self._answer(await self._toolset.threads.run(tool.function, **kwargs))

    async def _answer(self, value: Any) -> ToolResult:
        return await self._toolset.threads.run(answer, value) if is_slow(value) else answer(value)

    def _seen_by(self, context: Context) -> SessionContext:
        if self._context is None:
            self._context = SessionContext(str(uuid4()), self._task.id)
        return replace(self._context, call=context)

    async def finish(self) -> Mapping[str, float]:
        said = await self._last_words("calc_reward")
        return {name: float(said[name]) for name in self._instances if isinstance(said.get(name), int | float)}

    async def release(self) -> None:
        with anyio.CancelScope(shield=True):
            await self._last_words("release")
        self._instances = {}

    async def _last_words(self, method: str) -> dict[str, Any]:
        """All instances at once, so that one which never answers takes no time from the others."""
        said: dict[str, Any] = {}

        async def one(name: str, instance: _Instance) -> None:
            with anyio.move_on_after(LAST_S) as scope:
                try:
                    kwargs = instance.kwargs(method)
                    said[name] = await self._toolset.threads.run(getattr(instance.tool, method), instance.id, **kwargs)
                except Exception:  # user code: what comes after the policy's last word is logged, never raised
                    log.exception("%s of tool %r failed", method, name)
            if scope.cancelled_caught:
                log.error("%s of tool %r took longer than %s s", method, name, LAST_S)

        if len(self._instances) == 1:  # Then nobody is kept waiting, and a task group is half of what closing costs.
            await one(*next(iter(self._instances.items())))
            return said
        async with anyio.create_task_group() as tasks:
            for name, instance in self._instances.items():
                tasks.start_soon(one, name, instance)
        return said


def accepted(function: Callable[..., Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The keyword arguments that a function's signature has room for."""
    room = _room(getattr(function, "__func__", function), inspect.ismethod(function))
    return kwargs if room is None else {name: value for name, value in kwargs.items() if name in room}


@lru_cache
def _room(function: Callable[..., Any], bound: bool) -> frozenset[str] | None:
    """Read once, since that takes longer than all else in opening a session; None is room for any name."""
    parameters = list(inspect.signature(function).parameters.values())[bound:]
    return None if any(one.kind is one.VAR_KEYWORD for one in parameters) else frozenset(one.name for one in parameters)
