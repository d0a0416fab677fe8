"""Tests of `agent_data`, the state of a rollout that verl 0.7 passes to its tools."""

from __future__ import annotations

from pathlib import Path

import anyio
import pytest

from gateway.gateway import Gateway
from gateway.types import Task, ToolCall
from tests.conftest import Write

TOOLS = """
tools:
  - {class_name: theirs.Keeps, tool_schema: {type: function, function: {name: keeps}}}
  - {class_name: theirs.Finds, tool_schema: {type: function, function: {name: finds}}}
  - {class_name: theirs.Looks, tool_schema: {type: function, function: {name: looks}}}
  - {class_name: theirs.Early, tool_schema: {type: function, function: {name: early}}}
"""
TOOL_CLASSES = """
from verl.tools.base_tool import BaseTool
from verl.tools.schemas import ToolResponse

class Keeps(BaseTool):
    async def execute(self, instance_id, parameters, agent_data, **kwargs):
        agent_data.extra_fields.setdefault("calls", []).append(self.name)
        agent_data.last = self.name
        return ToolResponse(text=agent_data.request_id), 0.0, {}

class Finds(BaseTool):
    def execute(self, instance_id, parameters, **kwargs):
        data = kwargs["agent_data"]
        return f"{data.request_id} {data.extra_fields} {data.last} {data.tools_kwargs} {data.interaction_kwargs}"

class Looks(BaseTool):
    async def execute(self, instance_id, parameters, agent_data):
        return agent_data.messages[0]["content"]

class Early(BaseTool):
    async def execute(self, instance_id, parameters):
        return "as until 0.6"
"""


@pytest.fixture
def folder(write: Write) -> Path:
    write("conf/tools.yaml", TOOLS)
    return write("conf/theirs.py", TOOL_CLASSES).parent


async def call_tools(folder: Path, task: Task, *names: str) -> list[str]:
    """The answers of tools, called one after the other in one rollout."""
    with anyio.fail_after(60):
        async with Gateway.load(folder, None) as gateway, gateway.open(task) as session:
            return [(await session.call(ToolCall("1", name, "{}"))).text for name in names]


async def test_the_tools_of_a_rollout_share_agent_data(folder: Path) -> None:
    task = Task(create={"keeps": {"place": "here"}}, feedback_args={"query": "?"})
    first, second, third = await call_tools(folder, task, "keeps", "keeps", "finds")
    rows = {"keeps": {"create_kwargs": {"place": "here"}}}, {"query": "?"}
    assert first == second
    assert third == f"{first} {{'calls': ['keeps', 'keeps']}} keeps {rows[0]} {rows[1]}"
    assert await call_tools(folder, task, "keeps") != [first], "another rollout has its own"


async def test_a_class_without_the_parameter_is_called_without_it(folder: Path) -> None:
    assert await call_tools(folder, Task(), "early") == ["as until 0.6"]


async def test_an_unknown_attribute_is_refused_with_the_known_ones(folder: Path) -> None:
    with anyio.fail_after(60):
        async with Gateway.load(folder, None) as gateway, gateway.open() as session:
            result = await session.call(ToolCall("1", "looks", "{}"))
    assert "agent_data has no 'messages', as the gateway does not see the chat; it has request_id, " in result.text
    assert f"{folder / 'theirs.py'}:" in str(result.reason)
