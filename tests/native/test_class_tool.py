"""Tests of class tools: one `create` per rollout, `calc_reward` at the end, and always `release`."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from gateway import session as session_module
from gateway.errors import SessionError
from gateway.gateway import Gateway
from gateway.native import native_toolset as native_toolset
from gateway.native.base import BaseTool, OpenAIFunctionToolSchema, ToolResponse
from gateway.native.native_toolset import ClassTool, NativeToolset
from gateway.session import Reward
from gateway.tool_table import Source
from gateway.types import Outcome, Task, ToolCall

SCHEMA = {"type": "function", "function": {"name": "count", "parameters": {"type": "object", "$defs": {"a": {}}}}}


class CountingTool(BaseTool):
    """Records its calls in `config["events"]`."""

    def __init__(self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None = None) -> None:
        super().__init__(config, tool_schema or OpenAIFunctionToolSchema.model_validate(SCHEMA))
        self.events: list[str] = config["events"]
        self.counts: dict[str, int] = {}

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> tuple[str, ToolResponse]:
        assert instance_id is not None
        self.events.append(f"create {kwargs['start']}")
        self.counts[instance_id] = kwargs["start"]
        return instance_id, ToolResponse()

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        self.counts[instance_id] += 1
        return ToolResponse(text=str(self.counts[instance_id])), 0.25, {"calls": 1}

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        self.events.append("calc_reward")
        return float(self.counts[instance_id])

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        self.events.append("release")
        self.counts.pop(instance_id)


def make_gateway(tool: BaseTool) -> Gateway:
    return Gateway([Source("classes", NativeToolset([ClassTool(tool)]))])


async def test_all_calls_of_a_rollout_share_an_instance() -> None:
    events: list[str] = []
    tool = CountingTool({"events": events})
    async with make_gateway(tool) as gateway:
        ten, zero = (Task(create={"count": {"start": start}}) for start in (10, 0))
        async with gateway.open(ten) as first, gateway.open(zero) as second:
            texts = [(await first.call(ToolCall("1", "count"))).text for _ in range(2)]
            texts.append((await second.call(ToolCall("2", "count"))).text)
        assert texts == ["11", "12", "1"]
        assert first.rewards == [*[Reward("count", 0.25, "call", "1")] * 2, Reward("count", 12.0, "end")]
    assert events == ["create 10", "create 0", "calc_reward", "release", "calc_reward", "release"]
    assert not tool.counts


async def test_an_instance_whose_create_failed_is_released() -> None:
    events: list[str] = []
    async with make_gateway(CountingTool({"events": events})) as gateway:
        with pytest.raises(SessionError, match=r"'count' could not create its instance: KeyError: 'start'"):
            await gateway.begin(Task(create={"count": {}}))
    assert events == ["release"]


class HangingReward(CountingTool):
    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        await anyio.sleep_forever()
        return 0.0


async def test_release_is_called_after_a_hanging_reward(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_module, "REWARDS_TIMEOUT_S", 0.05)
    events: list[str] = []
    with anyio.fail_after(60):
        async with make_gateway(HangingReward({"events": events})) as gateway:
            async with gateway.open(Task(create={"count": {"start": 1}})):
                pass
            assert not gateway.sessions
    assert events == ["create 1", "release"]


async def test_the_reward_is_calculated_after_all_calls_have_ended() -> None:
    events: list[str] = []

    class SlowTool(CountingTool):
        async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
            try:
                await anyio.sleep_forever()
            finally:
                with anyio.CancelScope(shield=True):
                    await anyio.sleep(0.02)
                events.append("call ended")

    with anyio.fail_after(60):
        async with make_gateway(SlowTool({"events": events})) as gateway:
            session = await gateway.begin(Task(create={"count": {"start": 1}}))
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(session.call, ToolCall("1", "count"))
                await anyio.wait_all_tasks_blocked()
                await session.close()
    assert events == ["create 1", "call ended", "calc_reward", "release"]


async def test_release_is_called_when_the_rollout_is_cancelled() -> None:
    events: list[str] = []
    async with make_gateway(CountingTool({"events": events})) as gateway:
        with anyio.move_on_after(0.05):
            async with gateway.open(Task(create={"count": {"start": 1}})):
                await anyio.sleep_forever()
    assert events == ["create 1", "calc_reward", "release"]


async def test_a_class_with_blocking_methods_works() -> None:
    class Blocking(BaseTool):
        def create(self, instance_id: str | None = None, **kwargs: Any) -> Any:
            return instance_id

        def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
            return f"done {parameters['a']}", 1, {}

    schema = {"type": "function", "function": {"name": "block"}}
    tool = Blocking({}, OpenAIFunctionToolSchema.model_validate(schema))
    async with make_gateway(tool) as gateway, gateway.open() as session:
        result = await session.call(ToolCall("1", "block", '{"a": 1}'))
        assert (result.text, result.reward, result.outcome) == ("done 1", 1.0, Outcome.OK)
