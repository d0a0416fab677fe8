"""A class is created once for a rollout, released always, and asked for its reward at the end."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from gateway import session as session_module
from gateway.errors import SessionError
from gateway.gateway import Gateway
from gateway.native import toolset as native
from gateway.native.base import BaseTool, OpenAIFunctionToolSchema, ToolResponse
from gateway.native.gsm8k import Gsm8kTool
from gateway.native.toolset import ClassTool, NativeToolset
from gateway.session import Reward
from gateway.table import Source
from gateway.types import Outcome, Task, ToolCall

SCHEMA = {"type": "function", "function": {"name": "count", "parameters": {"type": "object", "$defs": {"a": {}}}}}


class Counter(BaseTool):
    """Notes each step of its life in `config["life"]`."""

    def __init__(self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None = None) -> None:
        super().__init__(config, tool_schema or OpenAIFunctionToolSchema.model_validate(SCHEMA))
        self.life: list[str] = config["life"]
        self.counts: dict[str, int] = {}

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> tuple[str, ToolResponse]:
        assert instance_id is not None
        self.life.append(f"create {kwargs['start']}")
        self.counts[instance_id] = kwargs["start"]
        if kwargs.get("broken"):
            raise RuntimeError("half made")
        return instance_id, ToolResponse()

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        self.counts[instance_id] += 1
        return ToolResponse(text=str(self.counts[instance_id])), 0.25, {"calls": 1}

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        self.life.append("calc_reward")
        if self.config.get("no_reward"):
            raise RuntimeError("no reward to be had")
        return float(self.counts[instance_id])

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        self.life.append("release")
        self.counts.pop(instance_id)


def gateway_of(tool: BaseTool) -> Gateway:
    return Gateway([Source("classes", NativeToolset([ClassTool(tool)]))])


async def test_one_instance_serves_every_call_of_a_rollout() -> None:
    life: list[str] = []
    tool = Counter({"life": life})
    async with gateway_of(tool) as gateway:
        ten, zero = (Task(create={"count": {"start": start}}) for start in (10, 0))
        async with gateway.open(ten) as one, gateway.open(zero) as other:
            texts = [(await one.call(ToolCall("1", "count"))).text for _ in range(2)]
            texts.append((await other.call(ToolCall("2", "count"))).text)
        assert texts == ["11", "12", "1"]
        assert one.rewards == [
            Reward("count", 0.25, "call", "1"),
            Reward("count", 0.25, "call", "1"),
            Reward("count", 12.0, "end"),
        ]
    assert life == ["create 10", "create 0", "calc_reward", "release", "calc_reward", "release"]
    assert not tool.counts


async def test_a_create_that_breaks_half_way_is_released_too() -> None:
    life: list[str] = []
    async with gateway_of(Counter({"life": life})) as gateway:
        with pytest.raises(SessionError, match=r"'count' could not create its instance: RuntimeError: half made"):
            async with gateway.open(Task(create={"count": {"start": 1, "broken": True}})):
                pass
    assert life == ["create 1", "release"]


async def test_release_comes_even_when_the_reward_cannot_be_had() -> None:
    life: list[str] = []
    async with gateway_of(Counter({"life": life, "no_reward": True})) as gateway:
        async with gateway.open(Task(create={"count": {"start": 1}})) as session:
            pass
        assert session.rewards == []
    assert life == ["create 1", "calc_reward", "release"]


class Silent(Counter):
    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        await anyio.sleep_forever()
        return 0.0


async def test_release_comes_even_when_the_reward_never_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_module, "REWARDS_S", 0.05)
    life: list[str] = []
    with anyio.fail_after(5):
        async with gateway_of(Silent({"life": life})) as gateway:
            async with gateway.open(Task(create={"count": {"start": 1}})):
                pass
            assert not gateway.sessions
    assert life == ["create 1", "release"]


async def test_a_reward_that_never_comes_costs_no_other_tool_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "LAST_S", 0.05)
    life: list[str] = []
    other = OpenAIFunctionToolSchema.model_validate({"type": "function", "function": {"name": "other"}})
    tools = [ClassTool(Silent({"life": life})), ClassTool(Counter({"life": life}, other))]
    start = {"start": 1}
    with anyio.fail_after(5):
        async with (
            Gateway([Source("classes", NativeToolset(tools))]) as gateway,
            gateway.open(Task(create={"count": start, "other": start})) as session,
        ):
            pass
    assert session.rewards == [Reward("other", 1.0, "end")]
    assert life[-2:] == ["release", "release"]


async def test_the_reward_is_asked_for_once_every_call_has_let_go() -> None:
    life: list[str] = []

    class Slow(Counter):
        async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
            try:
                await anyio.sleep_forever()
            finally:
                with anyio.CancelScope(shield=True):
                    await anyio.sleep(0.02)
                life.append("left")

    with anyio.fail_after(5):
        async with gateway_of(Slow({"life": life})) as gateway:
            session = await gateway.begin(Task(create={"count": {"start": 1}}))
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(session.call, ToolCall("1", "count"))
                await anyio.wait_all_tasks_blocked()
                await session.close()
    assert life == ["create 1", "left", "calc_reward", "release"]


async def test_release_comes_when_the_rollout_is_cancelled() -> None:
    life: list[str] = []
    async with gateway_of(Counter({"life": life})) as gateway:
        with anyio.move_on_after(0.05):
            async with gateway.open(Task(create={"count": {"start": 1}})):
                await anyio.sleep_forever()
    assert life == ["create 1", "calc_reward", "release"]


async def test_a_tool_that_the_rollout_did_not_choose_is_not_created() -> None:
    life: list[str] = []
    async with gateway_of(Counter({"life": life})) as gateway, gateway.open(Task(tools=())) as session:
        assert session.specs == []
    assert life == []


async def test_anything_that_json_schema_allows_stays_in_the_schema() -> None:
    tool = Counter({"life": []})
    assert ClassTool(tool).spec.parameters == SCHEMA["function"]["parameters"]  # type: ignore[index]


async def test_a_class_of_blocking_methods_works_as_well() -> None:
    class Blocking(BaseTool):
        def create(self, instance_id: str | None = None, **kwargs: Any) -> Any:
            return instance_id

        def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
            return f"done {parameters['a']}", 1, {}

    schema = {"type": "function", "function": {"name": "block"}}
    tool = Blocking({}, OpenAIFunctionToolSchema.model_validate(schema))
    async with gateway_of(tool) as gateway, gateway.open() as session:
        result = await session.call(ToolCall("1", "block", '{"a": 1}'))
        assert (result.text, result.reward, result.outcome) == ("done 1", 1.0, Outcome.OK)


@pytest.mark.parametrize("create", [{"ground_truth": "72"}, {"create_kwargs": {"ground_truth": "72"}}])
async def test_verls_example_tool_pays_only_for_an_improvement(create: dict[str, Any]) -> None:
    async with gateway_of(Gsm8kTool({})) as gateway:
        async with gateway.open(Task(create={"calc_gsm8k_reward": create})) as session:
            answers = [
                await session.call(ToolCall("1", "calc_gsm8k_reward", f'{{"answer": "{text}"}}'))
                for text in ("71", "72", "72")
            ]
            assert [answer.reward for answer in answers] == [-0.05, 0.0, -0.05]
        assert session.rewards[-1] == Reward("calc_gsm8k_reward", 1.0, "end")
