"""The toolset of an environment in a host process: shows the policy its tools, and passes the policy's turns on.

The environment answers calls of its tools itself. The calls here are the training loop's (`environment_stepper.py`), so
everything the environment says is on a tape. The process ends with the toolset.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Any, Self

from gateway.schema import parse_arguments
from gateway.toolset import Session
from gateway.types import DEFAULT_CONTEXT, Context, Outcome, Task, Text, ToolCall, ToolResult, ToolSpec
from mtrl_plugins.environments.environment_messages import read_tools
from mtrl_plugins.environments.episode_toolset import ANY_OBJECT
from mtrl_plugins.environments.host_process import EnvironmentFailed, EnvironmentHost

OPEN, TURN, END = "environment_open", "environment_turn", "environment_end"
"""The tools that only the training loop may call: to begin a rollout, to give it the policy's turn, and to end it."""
DESCRIPTIONS = {
    OPEN: "Begins a rollout of a row.",
    TURN: "Gives the environment the policy's turn.",
    END: "Says that the policy writes no more turns.",
}


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
        name = self.host.name
        own = [ToolSpec(tool, text, ANY_OBJECT, "loop", owner=name) for tool, text in DESCRIPTIONS.items()]
        self.specs = [*read_tools(opened["tools"], name), *own]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.host.stop_async()

    @asynccontextmanager
    async def open(self, task: Task) -> AsyncIterator[Session]:
        session = EnvironmentSession(self)
        try:
            yield session
        finally:
            session.close()


class EnvironmentSession:
    """One rollout in the environment."""

    def __init__(self, toolset: EnvironmentToolset) -> None:
        self._toolset, self._host = toolset, toolset.host
        self._place: dict[str, Any] = {}
        """The rollout's name in the host, and the start of the host that knows it."""
        self._ended: dict[str, Any] | None = None
        """How the environment's rollout ended."""
        self._is_kept = False
        """The environment keeps it until it is scored."""

    @property
    def specs(self) -> Sequence[ToolSpec]:
        return self._toolset.specs

    async def call(self, call: ToolCall, context: Context = DEFAULT_CONTEXT) -> ToolResult:
        arguments = parse_arguments(call.arguments)
        try:
            if call.name == OPEN:
                answer = await self._open(arguments)
            elif call.name == TURN:
                answer = await self._ask("turn", reply=arguments)
            elif call.name == END:
                answer = await self._end()
            else:
                raise EnvironmentFailed(f"{self._host.name} answers {call.name!r} itself, within a rollout")
        except EnvironmentFailed as error:
            return ToolResult((Text("The environment failed."),), Outcome.UNAVAILABLE, reason=str(error))
        return ToolResult(structured={**answer, **self._place})

    async def finish(self) -> Mapping[str, float]:
        """Nothing: the environment scores a group's rollouts together, once all have ended."""
        return {}

    def close(self) -> None:
        """Lets the environment forget the rollout, unless it is to be scored."""
        if self._place and not self._is_kept:
            self._host.tell("close", rollout=self._place["rollout"])

    async def _open(self, row: Mapping[str, Any]) -> dict[str, Any]:
        opened: dict[str, Any] = await self._host.request_async("open", **row)
        self._place = {"rollout": opened["rollout"], "starts": self._host.starts}
        return opened

    async def _ask(self, operation: str, **fields: Any) -> dict[str, Any]:
        if not self._place:
            raise EnvironmentFailed(f"{self._host.name}: the rollout has not begun")
        rollout = self._place["rollout"]
        answer: dict[str, Any] = await self._host.request_async(operation, rollout=rollout, **fields)
        self._ended = answer.get("ended", self._ended)
        return answer

    async def _end(self) -> dict[str, Any]:
        """How the rollout ended; from now on it is kept, to be scored."""
        ended = self._ended or (await self._ask("end"))["ended"]
        self._is_kept = not ended["error"]
        return {"ended": ended}


def open_call(row: Mapping[str, Any]) -> ToolCall:
    """The call that begins a rollout of a row."""
    return ToolCall("open", OPEN, json.dumps(row))


def turn_call(reply: Mapping[str, Any], number: int) -> ToolCall:
    """The call that gives the environment a turn."""
    return ToolCall(f"turn_{number}", TURN, json.dumps(reply))


END_CALL = ToolCall("end", END, "{}")
