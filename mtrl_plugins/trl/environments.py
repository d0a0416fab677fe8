"""Environments written for TRL: objects with `reset`, whose public methods are tools, one for each open rollout.

They are made when they are needed and used again, as in TRL: an environment is free once its rollout was scored.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, Self

import anyio

from gateway.errors import ConfigError
from gateway.native.class_environment import GET_REWARD, RESET, make_method_tool, tool_methods
from gateway.native.function import FunctionTool
from gateway.native.thread_pool import ThreadPool
from gateway.native.tool_results import exception_result, invalid_arguments_result
from gateway.schema import parse_arguments
from gateway.toolset import Session, unknown_tool_result
from gateway.types import DEFAULT_CONTEXT, Context, Task, ToolCall, ToolResult, ToolSpec
from mtrl_plugins.environments.episodes import add_observation
from mtrl_plugins.trl.caller_thread import DeadlinePassed
from mtrl_plugins.trl.function_tools import CallerTools
from mtrl_plugins.trl.rows import ENVIRONMENT
from trainer.reward.attempt import Attempt
from trainer.rollout.rollout import Rollout
from trainer.rollout.steppers import RolloutStart, Step, ToolsAndFeedback

Factory = Callable[[], Any]


@dataclass(eq=False)
class Lease:
    """An environment that a rollout uses."""

    name: str | None
    environment: Any
    lock: anyio.Lock = field(default_factory=anyio.Lock)
    """Calls of one turn change the same state, so that they come one after the other."""
    is_open: bool = True
    is_reusable: bool = True


class Environments:
    """The environments of a run. Each is known by the name that rows have for it; the only one is called None."""

    def __init__(self, factory: Factory | Mapping[str, Factory], tools: CallerTools) -> None:
        named = factory.items() if isinstance(factory, Mapping) else [(None, factory)]
        self.factories: dict[str | None, Factory] = dict(named)
        self.tools = tools
        self.has_choice = isinstance(factory, Mapping)
        probes = {name: self._make_probe(name) for name in self.factories}
        self.methods = {name: tool_methods(type(probe)) for name, probe in probes.items()}
        self.function_tools = self._make_tools(probes)
        self.reward_types = tuple(
            dict.fromkeys(type(probe) for probe in probes.values() if hasattr(type(probe), GET_REWARD))
        )
        self._free: dict[str | None, list[Any]] = {name: [probe] for name, probe in probes.items()}
        self._leases: dict[str, Lease] = {}
        """By the name of the rollout."""

    def _make_probe(self, name: str | None) -> Any:
        place = "environment_factory" if name is None else f"environment_factory[{name!r}]"
        factory = self.factories[name]
        if not callable(factory):
            raise ConfigError(f"is a {type(factory).__name__}", field=place, remedy="pass a class or a function")
        probe = factory()
        if not callable(getattr(type(probe), RESET, None)):
            remedy = "define `def reset(self, **row)`, which begins an episode"
            raise ConfigError(f"{type(probe).__name__} has no method `reset`", field=place, remedy=remedy)
        return probe

    def _make_tools(self, probes: Mapping[str | None, Any]) -> dict[str, FunctionTool]:
        """The tools of all environments by name. Of a name in several environments, one schema is shown."""
        tools: dict[str, FunctionTool] = {}
        for name, probe in probes.items():
            for method in self.methods[name]:
                tool = make_method_tool(probe, method, type(probe).__name__)
                if tools.setdefault(method, tool).spec.parameters != tool.spec.parameters:
                    problem = f"has other parameters than the method of {tools[method].spec.owner}"
                    place = f"{type(probe).__name__}.{method}"
                    raise ConfigError(problem, field=place, remedy="rename one of them")
        return tools

    @property
    def async_names(self) -> frozenset[str]:
        """The names of async methods."""
        return frozenset(name for name, tool in self.function_tools.items() if tool.is_async)

    async def take(self, key: str, name: str | None, threads: ThreadPool) -> Lease:
        """An environment for a rollout: a free one, or a new one."""
        self._return(self._leases.pop(rollout_name(key), None))  # Of an attempt that failed.
        free = self._free[name]
        lease = Lease(name, free.pop() if free else await threads.run(self.tools.run, self.factories[name]))
        self._leases[rollout_name(key)] = lease
        return lease

    def lease(self, key: str) -> Lease:
        """The environment of a rollout."""
        return self._leases[rollout_name(key)]

    def of_attempts(self, attempts: Sequence[Attempt]) -> list[Any]:
        """The environment of each attempt, for reward functions."""
        return [self._leases[attempt.rollout.name].environment for attempt in attempts]

    def release(self, rollouts: Sequence[Rollout]) -> None:
        """Frees the environments of rollouts that were scored."""
        for rollout in rollouts:
            self._return(self._leases.pop(rollout.name, None))

    def _return(self, lease: Lease | None) -> None:
        if lease is not None and lease.is_reusable and not lease.is_open:
            self._free[lease.name].append(lease.environment)

    def reward_functions(self) -> dict[str, Callable[..., Any]]:
        """A reward function for each class of environments that has `get_reward`, by the name of the class."""
        return {cls.__name__: _make_reward_function(cls) for cls in self.reward_types}


def rollout_name(key: str) -> str:
    """The name of a rollout, which its further attempts share."""
    head, _, index = key.rpartition("/")
    return f"{head}/{index.partition('.')[0]}"


def _make_reward_function(cls: type[Any]) -> Callable[..., Any]:
    if inspect.iscoroutinefunction(getattr(cls, GET_REWARD)):

        async def wait(environments: Sequence[Any], **kwargs: Any) -> list[Any]:
            return [await each.get_reward() if type(each) is cls else None for each in environments]

        return wait

    def get_reward(environments: Sequence[Any], **kwargs: Any) -> list[Any]:
        return [each.get_reward() if type(each) is cls else None for each in environments]

    return get_reward


class EnvironmentToolset:
    """The methods of environments as a toolset; a session has one environment."""

    def __init__(self, environments: Environments) -> None:
        self.environments, self.threads = environments, ThreadPool()
        self.specs: Sequence[ToolSpec] = tuple(tool.spec for tool in environments.function_tools.values())

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        return None

    @asynccontextmanager
    async def open(self, task: Task) -> AsyncIterator[Session]:
        yield _EnvironmentSession(self, task)


class _EnvironmentSession:
    def __init__(self, toolset: EnvironmentToolset, task: Task) -> None:
        self._toolset, self._key = toolset, task.rollout

    @property
    def specs(self) -> Sequence[ToolSpec]:
        return self._toolset.specs

    async def call(self, call: ToolCall, context: Context = DEFAULT_CONTEXT) -> ToolResult:
        environments = self._toolset.environments
        lease = environments.lease(self._key)
        if call.name not in environments.methods[lease.name]:
            return unknown_tool_result(call.name, self.specs)
        try:
            kwargs = environments.function_tools[call.name].bind(parse_arguments(call.arguments))
        except ValueError as error:
            return invalid_arguments_result(error)
        method = environments.tools.wrap(_only_while_open(lease, getattr(lease.environment, call.name)))
        async with lease.lock:
            try:
                result: ToolResult = await self._toolset.threads.run(method, **kwargs)
                return result
            except DeadlinePassed as error:
                lease.is_reusable = False
                return exception_result(call.name, error)
            except BaseException:
                lease.is_reusable = False  # Cancelled; its method may still be running.
                raise

    async def finish(self) -> Mapping[str, float]:
        return {}


def _only_while_open(lease: Lease, method: Callable[..., Any]) -> Callable[..., Any]:
    """The method, which does nothing if its rollout has ended while the call was waiting for the caller's thread."""
    if inspect.iscoroutinefunction(method):
        return method

    @wraps(method)
    def call(**kwargs: Any) -> Any:
        if not lease.is_open:
            raise RuntimeError("the rollout has ended")
        return method(**kwargs)

    return call


class EnvironmentStepper(ToolsAndFeedback):
    """Resets a rollout's environment with its row, and adds what it observes to the last message of the prompt."""

    def __init__(self, environments: Environments) -> None:
        self.environments, self.threads = environments, ThreadPool()

    @asynccontextmanager
    async def begin(self, start: RolloutStart) -> AsyncIterator[tuple[Step, Self]]:
        environments, row = self.environments, dict(start.task.columns)
        name = row.pop(ENVIRONMENT) if environments.has_choice else None
        lease = await environments.take(start.key, name, self.threads)
        try:
            reset = lease.environment.reset
            if inspect.iscoroutinefunction(reset):
                observation = await reset(**row)
            else:
                observation = await self.threads.run(environments.tools.run, reset, **row)
            yield Step(history=add_observation(start.task.messages, observation)), self
        finally:
            lease.is_open = False
