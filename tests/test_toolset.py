"""Tests of renaming toolsets."""

from __future__ import annotations

from gateway.native.base import BaseTool, OpenAIFunctionToolSchema
from gateway.native.function import FunctionTool
from gateway.native.native_toolset import ClassTool, NativeToolset
from gateway.toolset import (
    Toolset,
    add_prefix,
)
from gateway.types import Task


def native(*names: str) -> Toolset:
    def saying(word: str) -> FunctionTool:
        def say(text: str = "") -> str:
            """Says its own name and what it was told."""
            return f"{word}{text}"

        return FunctionTool(say, name=word, owner="tests")

    return NativeToolset([saying(name) for name in names])


def names(toolset: Toolset) -> list[str]:
    return [spec.name for spec in toolset.specs]


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
