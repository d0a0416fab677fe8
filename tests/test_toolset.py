"""Tests of renaming toolsets."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from gateway.native.base import BaseTool, OpenAIFunctionToolSchema
from gateway.native.function import FunctionTool
from gateway.native.native_toolset import ClassTool, NativeToolset
from gateway.toolset import (
    Toolset,
    add_prefix,
)
from gateway.types import Outcome, Task, ToolCall


def native(*names: str) -> Toolset:
    def saying(word: str) -> FunctionTool:
        def say(text: str = "") -> str:
            """Says its own name and what it was told."""
            return f"{word}{text}"

        return FunctionTool(say, name=word, owner="tests")

    return NativeToolset([saying(name) for name in names])


async def call_text(toolset: Toolset, name: str) -> tuple[str, Outcome]:
    async with toolset, toolset.open(Task()) as session:
        result = await session.call(ToolCall("1", name, json.dumps({"text": "!"})))
    return result.text, result.outcome


def names(toolset: Toolset) -> list[str]:
    return [spec.name for spec in toolset.specs]


async def test_prefix_changes_only_the_name() -> None:
    toolset = add_prefix(native("a", "b"), "x_")
    assert names(toolset) == ["x_a", "x_b"]
    assert await call_text(toolset, "x_a") == ("a!", Outcome.OK)
    text, outcome = await call_text(toolset, "a")
    assert outcome is Outcome.INVALID and "x_a, x_b" in text


@given(st.lists(st.text("xyz_", min_size=1, max_size=3), max_size=4))
def test_nested_prefixes_concatenate(prefixes: list[str]) -> None:
    toolset = native("a", "b")
    for text in reversed(prefixes):
        toolset = add_prefix(toolset, text)
    assert names(toolset) == names(add_prefix(native("a", "b"), "".join(prefixes)))


async def test_renamed_class_tool_is_created_and_rewarded_by_its_new_name() -> None:
    class Tool(BaseTool):
        async def create(self, instance_id: str | None = None, start: float = 0, **kwargs: object) -> str:  # type: ignore[override]
            self.start = start
            return str(instance_id)

        async def calc_reward(self, instance_id: str, **kwargs: object) -> float:
            return self.start

    schema = OpenAIFunctionToolSchema.model_validate({"function": {"name": "tool"}})
    toolset = add_prefix(NativeToolset([ClassTool(Tool({}, schema))]), "my_")
    async with toolset, toolset.open(Task(create={"my_tool": {"start": 3}})) as session:
        assert await session.finish() == {"my_tool": 3.0}


def test_unchanged_specs_are_the_same_object() -> None:
    toolset = add_prefix(native("a", "b"), "x_")
    assert toolset.specs is toolset.specs
