"""Native tools are a toolset: functions are called, classes live as long as the rollout does."""

from __future__ import annotations

import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from types import TracebackType
from typing import Any, Self
from uuid import uuid4

import anyio

from gateway.errors import SessionError
from gateway.native.answer import answer, failure
from gateway.native.base import BaseTool
from gateway.native.function import FunctionTool, SessionContext
from gateway.native.thread import Threads
from gateway.schema import parse_object
from gateway.toolset import Session, missing
from gateway.types import ALONE, Context, Hints, Outcome, Task, Text, ToolCall, ToolResult, ToolSpec

log = logging.getLogger(__name__)

STEP_S = 60.0
"""Deadline of one `create`, `calc_reward` or `release`."""


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


class _NativeSession:
    __slots__ = ("_context", "_instances", "_task", "_toolset")

    def __init__(self, toolset: NativeToolset, task: Task) -> None:
        self._toolset, self._task = toolset, task
        self._instances: dict[str, str] = {}
        self._context: SessionContext | None = None

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
        self._instances[name] = instance_id
        given = dict(self._task.create.get(name, {}))
        given = given.get("create_kwargs", given)  # rows written for verl nest them
        kwargs = accepted(tool.create, given | {"create_kwargs": given})
        try:
            with anyio.fail_after(STEP_S):
                made = await self._toolset.threads.run(tool.create, instance_id, **kwargs)
        except Exception as error:  # user code: whatever it raises, the session cannot open
            problem = f"tool {name!r} could not create its instance: {type(error).__name__}: {error}"
            raise SessionError(problem) from error
        own_id = made[0] if isinstance(made, tuple) else made
        self._instances[name] = own_id if isinstance(own_id, str) else instance_id

    async def call(self, call: ToolCall, context: Context = ALONE) -> ToolResult:
        tool = self._toolset.tools.get(call.name)
        if tool is None:
            return missing(call.name, self.specs)
        arguments = parse_object(call.arguments)
        try:
            if isinstance(tool, FunctionTool):
                return await self._call_function(tool, arguments, context)
            instance_id = self._instances[call.name]
            return answer(await self._toolset.threads.run(tool.tool.execute, instance_id, arguments))
        except Exception as error:  # user code: its exceptions are results
            return failure(call.name, error)

    async def _call_function(self, tool: FunctionTool, arguments: dict[str, Any], context: Context) -> ToolResult:
        try:
            kwargs = tool.bind(arguments)
        except ValueError as error:
            return ToolResult((Text(str(error)),), Outcome.INVALID, reason="arguments do not fit the function")
        if tool.context_name is not None:
            kwargs[tool.context_name] = self._seen_by(context)
        if tool.is_async:
            return answer(await tool.function(**kwargs))
        return answer(await self._toolset.threads.run(tool.function, **kwargs))

    def _seen_by(self, context: Context) -> SessionContext:
        if self._context is None:
            self._context = SessionContext(str(uuid4()), self._task.id)
        return replace(self._context, call=context)

    async def finish(self) -> Mapping[str, float]:
        rewards: dict[str, float] = {}
        for name, instance_id in self._instances.items():
            tool = self._toolset.tools[name]
            reward = await self._last_word(tool, "calc_reward", instance_id)
            if isinstance(reward, int | float):
                rewards[name] = float(reward)
        return rewards

    async def release(self) -> None:
        for name, instance_id in self._instances.items():
            with anyio.CancelScope(shield=True):
                await self._last_word(self._toolset.tools[name], "release", instance_id)
        self._instances = {}

    async def _last_word(self, tool: NativeTool, method: str, instance_id: str) -> Any:
        """`calc_reward` and `release` come after the policy's last word: their failure is logged, never raised."""
        act: Callable[..., Awaitable[Any]] = getattr(tool.tool, method) if isinstance(tool, ClassTool) else _nothing
        with anyio.move_on_after(STEP_S) as scope:
            try:
                return await self._toolset.threads.run(act, instance_id)
            except Exception:  # user code: one broken tool must not keep the others from their release
                log.exception("%s of tool %r failed", method, tool.spec.name)
        if scope.cancelled_caught:
            log.error("%s of tool %r took longer than %s s", method, tool.spec.name, STEP_S)
        return None


async def _nothing(instance_id: str) -> None:
    """A function has no instance to speak of."""


def accepted(function: Callable[..., Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The keyword arguments that a function's signature has room for."""
    parameters = inspect.signature(function).parameters
    if any(one.kind is one.VAR_KEYWORD for one in parameters.values()):
        return kwargs
    return {name: value for name, value in kwargs.items() if name in parameters}
