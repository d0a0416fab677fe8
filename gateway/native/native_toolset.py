"""The toolset of native tools: functions and `BaseTool` classes, whose instances live as long as the rollout.

Whatever a tool returns or raises becomes one `ToolResult`.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple, Self
from uuid import uuid4

import anyio

from gateway.await_user_code import await_user_code
from gateway.errors import SessionError, describe_exception
from gateway.native.agent_data import AgentData, is_verl_tool, kwargs_by_method
from gateway.native.base import BaseTool, ToolResponse
from gateway.native.function import FunctionTool, SessionContext
from gateway.native.process_pool import ProcessPool
from gateway.native.thread_pool import ThreadPool
from gateway.native.tool_results import convert_result, exception_result, invalid_arguments_result
from gateway.schema import parse_arguments
from gateway.toolset import Session, unknown_tool_result
from gateway.types import (
    DEFAULT_CONTEXT,
    Context,
    Hints,
    Part,
    Task,
    Text,
    ToolCall,
    ToolResult,
    ToolSpec,
)
from gateway.user_code import UserCode

log = logging.getLogger(__name__)

CREATE_TIMEOUT_S = 60.0
"""Deadline of one `create`."""
FINISH_TIMEOUT_S = 25.0
"""Deadline of all `calc_reward` of a rollout, and then of all `release`; shorter than a closing session waits."""


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
    """Native tools as a toolset."""

    def __init__(self, tools: Sequence[NativeTool]) -> None:
        self.tools = {tool.spec.name: tool for tool in tools}
        self.specs: Sequence[ToolSpec] = tuple(tool.spec for tool in tools)
        self.on_change: list[Callable[[], None]] = []
        """What is to be called when the list of tools has changed, which it never does."""
        self.threads = ThreadPool()
        self.processes: dict[str, ProcessPool] = {
            name: ProcessPool(tool.process, name)
            for name, tool in self.tools.items()
            if isinstance(tool, FunctionTool) and tool.process is not None
        }
        """By tool, the child processes of functions that do not run in threads."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        for pool in self.processes.values():
            await pool.close()

    def open(self, task: Task) -> AbstractAsyncContextManager[Session]:
        return _NativeSession(self, task)


class _Instance(NamedTuple):
    tool: BaseTool
    id: str
    kwargs: Mapping[str, Any]
    """The task's keyword arguments by method, in verl's form: `create_kwargs`, `execute_kwargs`, and so on."""

    def kwargs_for(self, method: str) -> dict[str, Any]:
        return dict(self.kwargs.get(f"{method}_kwargs") or {})


class _NativeSession:
    __slots__ = ("_agent_data", "_context", "_create_parts", "_instances", "_task", "_toolset")

    def __init__(self, toolset: NativeToolset, task: Task) -> None:
        self._toolset, self._task = toolset, task
        self._instances: dict[str, _Instance] = {}
        self._create_parts: dict[str, tuple[Part, ...]] = {}
        """By tool, the response of its `create`, which precedes the tool's first result."""
        self._context: SessionContext | None = None
        self._agent_data: AgentData | None = None

    @property
    def specs(self) -> Sequence[ToolSpec]:
        return self._toolset.specs

    async def __aenter__(self) -> Self:
        """Creates an instance of each class tool of the task."""
        try:
            for name, tool in self._toolset.tools.items():
                if isinstance(tool, ClassTool) and (self._task.tools is None or name in self._task.tools):
                    await self._create_instance(name, tool.tool)
        except BaseException:
            await self.__aexit__(None, None, None)
            raise
        return self

    async def _create_instance(self, name: str, tool: BaseTool) -> None:
        """The id is chosen before `create` is called, so that a `create` that fails half-way is released too."""
        instance_id = str(uuid4())
        by_method = kwargs_by_method(self._task.create.get(name, {}))
        self._instances[name] = instance = _Instance(tool, instance_id, by_method)
        create_kwargs = instance.kwargs_for("create")
        kwargs = accepted_kwargs(tool.create, create_kwargs | {"create_kwargs": create_kwargs})
        try:
            with anyio.fail_after(CREATE_TIMEOUT_S):
                created = await self._toolset.threads.run(tool.create, instance_id, **kwargs)
                if isinstance(created, tuple) and isinstance(created[-1], ToolResponse) and not created[-1].is_empty():
                    self._create_parts[name] = (await convert_result(self._toolset.threads, created[-1])).parts
        except Exception as error:  # user code: whatever it raises, the session cannot open
            raise SessionError(f"tool {name!r} could not create its instance: {describe_exception(error)}") from error
        own_id = created[0] if isinstance(created, tuple) else created
        self._instances[name] = instance._replace(id=own_id if isinstance(own_id, str) else instance_id)

    async def call(self, call: ToolCall, context: Context = DEFAULT_CONTEXT) -> ToolResult:
        tool = self._toolset.tools.get(call.name)
        if tool is None:
            return unknown_tool_result(call.name, self.specs)
        arguments = parse_arguments(call.arguments)
        try:
            if isinstance(tool, FunctionTool):
                return await self._call_function(tool, arguments, context)
            return await self._call_class(call.name, tool.tool, arguments)
        except Exception as error:  # user code: its exceptions are results
            return exception_result(call.name, error)

    async def _call_class(self, name: str, tool: BaseTool, arguments: dict[str, Any]) -> ToolResult:
        instance = self._instances[name]
        kwargs = self._agent_data_kwargs(tool) | instance.kwargs_for("execute")
        value = await self._toolset.threads.run(tool.execute, instance.id, arguments, **kwargs)
        result = await convert_result(self._toolset.threads, value, is_execute=True)
        create_parts = self._create_parts.pop(name, ())
        return replace(result, parts=(*create_parts, *result.parts)) if create_parts else result

    def _agent_data_kwargs(self, tool: BaseTool) -> dict[str, Any]:
        """`agent_data` for classes written for verl, if their `execute` takes it."""
        if not is_verl_tool(tool):
            return {}
        self._agent_data = self._agent_data or AgentData(self._task)
        return accepted_kwargs(tool.execute, {"agent_data": self._agent_data})

    async def _call_function(self, tool: FunctionTool, arguments: dict[str, Any], context: Context) -> ToolResult:
        if (pool := self._toolset.processes.get(tool.spec.name)) is not None:
            return await pool.call(arguments)
        try:
            kwargs = tool.bind(arguments)
        except ValueError as error:
            return invalid_arguments_result(error)
        if tool.context_parameter is not None:
            kwargs[tool.context_parameter] = self._session_context(context)
        if tool.is_async:
            with UserCode():
                value = await await_user_code(tool.function(**kwargs))
        else:
            value = await self._toolset.threads.run(tool.function, **kwargs)
        if type(value) is str and not value.startswith("data:"):  # as most values are
            return ToolResult((Text(value),))
        return await convert_result(self._toolset.threads, value)

    def _session_context(self, context: Context) -> SessionContext:
        if self._context is None:
            self._context = SessionContext(str(uuid4()), self._task.id)
        return replace(self._context, call=context)

    async def finish(self) -> Mapping[str, float]:
        """The rewards that `calc_reward` returns, by tool."""
        rewards = await self._call_all("calc_reward")
        return {name: float(rewards[name]) for name in self._instances if isinstance(rewards.get(name), int | float)}

    async def __aexit__(self, *_: object) -> None:
        if self._instances:
            with anyio.CancelScope(shield=True):
                await self._call_all("release")
            self._instances = {}

    async def _call_all(self, method: str) -> dict[str, Any]:
        """Calls a method of all instances concurrently, so that a hung one takes no time from the others."""
        values: dict[str, Any] = {}
        if not self._instances:
            return values

        async def call(name: str, instance: _Instance) -> None:
            with anyio.move_on_after(FINISH_TIMEOUT_S) as scope:
                try:
                    function, kwargs = getattr(instance.tool, method), instance.kwargs_for(method)
                    values[name] = await self._toolset.threads.run(function, instance.id, **kwargs)
                except Exception:  # user code: the rollout is over, so that errors are only logged
                    log.exception("%s of tool %r failed", method, name)
            if scope.cancelled_caught:
                log.error("%s of tool %r took longer than %s s", method, name, FINISH_TIMEOUT_S)

        if len(self._instances) == 1:  # A task group would take half of the time of closing.
            await call(*next(iter(self._instances.items())))
            return values
        async with anyio.create_task_group() as tasks:
            for name, instance in self._instances.items():
                tasks.start_soon(call, name, instance)
        return values


def accepted_kwargs(function: Callable[..., Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Those of the keyword arguments that a function's signature accepts."""
    names = _parameter_names(getattr(function, "__func__", function), inspect.ismethod(function))
    return kwargs if names is None else {name: value for name, value in kwargs.items() if name in names}


@lru_cache
def _parameter_names(function: Callable[..., Any], is_bound: bool) -> frozenset[str] | None:
    """None if any name is accepted. Cached: reading a signature takes longer than the rest of opening a session."""
    parameters = list(inspect.signature(function).parameters.values())[is_bound:]
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None
    return frozenset(parameter.name for parameter in parameters)
