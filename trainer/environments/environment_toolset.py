"""The toolset of an environment in a host process: shows the policy its tools. The process ends with the toolset.

The environment answers calls itself, in `environment_stepper.py`, so that none arrives here.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Self

from gateway.toolset import Session
from gateway.types import DEFAULT_CONTEXT, Context, Outcome, Task, Text, ToolCall, ToolResult, ToolSpec
from trainer.environments.environment_messages import read_tools
from trainer.environments.host_process import EnvironmentFailed, EnvironmentHost


class EnvironmentToolset:
    """The tools of one environment, as its first row shows them."""

    def __init__(self, host: EnvironmentHost) -> None:
        self.host = host
        self.specs: Sequence[ToolSpec] = ()

    async def __aenter__(self) -> Self:
        opened = await self.host.request_async("open", split="train", row=0)
        self.host.tell("close", rollout=opened["rollout"])
        if "ended" in opened:
            how = opened["ended"]
            raise EnvironmentFailed(f"{self.host.name} ended its first rollout: {how['error'] or how['stop']}")
        self.specs = read_tools(opened["tools"], self.host.name)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.host.stop_async()

    @asynccontextmanager
    async def open(self, task: Task) -> AsyncIterator[Session]:
        yield _EnvironmentSession(self)


class _EnvironmentSession:
    def __init__(self, toolset: EnvironmentToolset) -> None:
        self._toolset = toolset

    @property
    def specs(self) -> Sequence[ToolSpec]:
        return self._toolset.specs

    async def call(self, call: ToolCall, context: Context = DEFAULT_CONTEXT) -> ToolResult:
        text = "This tool answers only within a rollout of its environment."
        return ToolResult((Text(text),), Outcome.UNAVAILABLE, reason=f"{self._toolset.host.name}: not in a rollout")

    async def finish(self) -> Mapping[str, float]:
        return {}
