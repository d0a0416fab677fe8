"""The toolset of an environment class, in TRL's form: `reset` begins an episode, the other public methods are tools.

A session has an object of its own. As in TRL, it is used again by a later session, after the next `reset`. A function
that returns such objects, as `environment_factory` may be, stands for their class.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from numbers import Real
from typing import Any, Self

import anyio

from gateway.errors import ConfigError, SessionError, describe_exception
from gateway.native.agent_data import kwargs_by_method
from gateway.native.function import FunctionTool
from gateway.native.native_toolset import CREATE_TIMEOUT_S, FINISH_TIMEOUT_S
from gateway.native.thread_pool import ThreadPool
from gateway.native.tool_results import convert_result, exception_result, invalid_arguments_result
from gateway.schema import parse_arguments
from gateway.toolset import Session, unknown_tool_result
from gateway.types import DEFAULT_CONTEXT, Context, Outcome, Part, Task, Text, ToolCall, ToolResult, ToolSpec

log = logging.getLogger(__name__)

RESET, GET_REWARD = "reset", "get_reward"
REWARD = "reward"
"""The attribute that has the reward of an environment without `get_reward`, as in TRL's examples."""
INTERRUPTED = "The environment is not available: an earlier call was interrupted."


def is_environment_class(target: object) -> bool:
    """Whether a class is an environment rather than one tool, which has `execute`."""
    return (
        inspect.isclass(target) and inspect.isfunction(getattr(target, RESET, None)) and not hasattr(target, "execute")
    )


def is_environment(target: object) -> bool:
    """Whether what `class_name` names is an environment class or a function that makes environments, not a tool."""
    return callable(target) and (not inspect.isclass(target) or is_environment_class(target))


def tool_methods(cls: type) -> tuple[str, ...]:
    """The names of a class's public methods but `reset` and `get_reward`."""
    members = inspect.getmembers(cls, inspect.isfunction)
    return tuple(name for name, _ in members if not name.startswith("_") and name not in (RESET, GET_REWARD))


def make_method_tool(environment: object, method: str, owner: str) -> FunctionTool:
    """The tool that a method becomes. Raises ConfigError if it cannot be one."""
    try:
        return FunctionTool(getattr(environment, method), owner=owner)
    except (TypeError, NameError) as error:
        place, remedy = f"{type(environment).__name__}.{method}", "give every parameter a name and a type hint"
        raise ConfigError(f"cannot be a tool: {error}", field=place, remedy=remedy) from error


class ClassEnvironment:
    """An environment class, or a function that makes its objects, with its tools and the objects in no session."""

    def __init__(self, make: Callable[..., Any], config: Mapping[str, Any], owner: str = "") -> None:
        self.make, self.config = make, dict(config)
        probe = make(**self.config)
        cls = type(probe)
        if not is_environment_class(cls):
            remedy = "return an object whose class has `reset`, or name a class"
            raise ConfigError(f"makes a {cls.__name__}, which is no environment", remedy=remedy)
        self.name = cls.__name__
        self.tools = {name: make_method_tool(probe, name, owner) for name in tool_methods(cls)}
        if not self.tools:
            remedy = "add methods with type hints and docstrings"
            raise ConfigError(f"{self.name} has no public method but `{RESET}`", remedy=remedy)
        self.free: list[Any] = [probe]


class ClassEnvironmentToolset:
    """The methods of an environment class as tools."""

    def __init__(self, environment: ClassEnvironment) -> None:
        self.environment = environment
        self.specs: Sequence[ToolSpec] = tuple(tool.spec for tool in environment.tools.values())
        self.threads = ThreadPool()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        return None

    @asynccontextmanager
    async def open(self, task: Task) -> AsyncIterator[Session]:
        session = _EnvironmentSession(self)
        if task.tools is None or self.environment.tools.keys() & {*task.tools}:
            await session.begin(task)
        try:
            yield session
        finally:
            session.release()


class _EnvironmentSession:
    """One episode. Its calls change the same object, so that they run one after the other."""

    def __init__(self, toolset: ClassEnvironmentToolset) -> None:
        self._toolset, self._environment = toolset, toolset.environment
        self._object: Any = None
        self._lock = anyio.Lock()
        self._is_interrupted = False
        """A method was given up; it may still be running."""
        self._opening: tuple[Part, ...] = ()
        """What `reset` observed, which precedes the first result."""

    @property
    def specs(self) -> Sequence[ToolSpec]:
        return self._toolset.specs

    async def begin(self, task: Task) -> None:
        """Takes or makes an object, and resets it with the task's arguments for any of the tools."""
        name, kwargs = self._environment.name, dict[str, Any]()
        for tool in self._environment.tools:
            kwargs |= kwargs_by_method(task.create.get(tool, {})).get("create_kwargs") or {}
        try:
            with anyio.fail_after(CREATE_TIMEOUT_S):
                free = self._environment.free
                made = free.pop() if free else await self._run(self._environment.make, **self._environment.config)
                observation = await self._run(made.reset, **kwargs)
                if observation is not None:
                    self._opening = (await convert_result(self._toolset.threads, observation)).parts
                self._object = made
        except Exception as error:  # user code: whatever it raises, the session cannot open
            problem = f"environment {name!r} could not be reset: {describe_exception(error)}"
            raise SessionError(problem) from error

    async def call(self, call: ToolCall, context: Context = DEFAULT_CONTEXT) -> ToolResult:
        tool = self._environment.tools.get(call.name)
        if tool is None or self._object is None:
            return unknown_tool_result(call.name, self.specs)
        try:
            kwargs = tool.bind(parse_arguments(call.arguments))
        except ValueError as error:
            return invalid_arguments_result(error)
        async with self._lock:
            if self._is_interrupted:
                reason = f"{self._environment.name}: an earlier call was interrupted, and may still be running"
                return ToolResult((Text(INTERRUPTED),), Outcome.CANCELLED, reason=reason)
            try:
                value = await self._run(getattr(self._object, call.name), **kwargs)
                result = await convert_result(self._toolset.threads, value)
            except Exception as error:  # user code: its exceptions are results
                result = exception_result(call.name, error)
            opening, self._opening = self._opening, ()
            return replace(result, parts=(*opening, *result.parts)) if opening else result

    async def finish(self) -> Mapping[str, float]:
        """What `get_reward` returns, or the attribute `reward` where it is missing, by the name of the class."""
        name = self._environment.name
        if self._object is None or self._is_interrupted:
            return {}
        with anyio.move_on_after(FINISH_TIMEOUT_S):
            try:
                get_reward = getattr(self._object, GET_REWARD, None)
                reward = await self._run(get_reward or (lambda: getattr(self._object, REWARD, None)))
                return {name: float(reward)} if isinstance(reward, Real) else {}
            except Exception:  # user code: the rollout is over, so that errors are only logged
                log.exception("%s of environment %r failed", GET_REWARD, name)
                return {}
        log.error("%s of environment %r took longer than %s s", GET_REWARD, name, FINISH_TIMEOUT_S)
        return {}

    def release(self) -> None:
        """Frees the object for another session, unless one of its methods was given up."""
        if self._object is not None and not self._is_interrupted:
            self._environment.free.append(self._object)
        self._object = None

    async def _run(self, function: Any, /, **kwargs: Any) -> Any:
        """Calls a method in a thread, or awaits an async one."""
        self._is_interrupted = True
        try:
            value = await self._toolset.threads.run(function, **kwargs)
        except Exception:
            self._is_interrupted = False
            raise
        self._is_interrupted = False
        return value
