"""Toolsets combined, renamed and filtered are toolsets: each wrapper keeps what it does not change."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.errors import ConfigError
from gateway.native.base import BaseTool, OpenAIFunctionToolSchema
from gateway.native.function import FunctionTool
from gateway.native.toolset import ClassTool, NativeToolset
from gateway.toolset import Combined, Toolset, allow, prefix
from gateway.types import Outcome, Task, ToolCall


def native(*names: str) -> Toolset:
    def saying(word: str) -> FunctionTool:
        def say(text: str = "") -> str:
            """Says its own name and what it was told."""
            return f"{word}{text}"

        return FunctionTool(say, name=word, owner="tests")

    return NativeToolset([saying(name) for name in names])


async def say(toolset: Toolset, name: str) -> tuple[str, Outcome]:
    async with toolset, toolset.open(Task()) as session:
        result = await session.call(ToolCall("1", name, json.dumps({"text": "!"})))
    return result.text, result.outcome


def names(toolset: Toolset) -> list[str]:
    return [spec.name for spec in toolset.specs]


async def test_a_prefix_changes_the_name_and_nothing_else() -> None:
    toolset = prefix(native("a", "b"), "x_")
    assert names(toolset) == ["x_a", "x_b"]
    assert await say(toolset, "x_a") == ("a!", Outcome.OK)
    text, outcome = await say(toolset, "a")
    assert outcome is Outcome.INVALID and "x_a, x_b" in text


async def test_only_what_is_allowed_is_offered_and_answered() -> None:
    toolset = allow(native("a", "b"), ["b"])
    assert names(toolset) == ["b"]
    assert (await say(toolset, "a"))[1] is Outcome.INVALID
    assert await say(toolset, "b") == ("b!", Outcome.OK)


async def test_combined_toolsets_answer_each_for_its_own() -> None:
    toolset = Combined([native("a"), prefix(native("a"), "other_")])
    assert names(toolset) == ["a", "other_a"]
    assert await say(toolset, "other_a") == ("a!", Outcome.OK)
    assert (await say(toolset, "b"))[1] is Outcome.INVALID


async def test_two_owners_of_a_name_cannot_be_combined() -> None:
    with pytest.raises(ConfigError, match="two tools are named 'a'"):
        async with Combined([native("a"), native("a")]):
            pass


@given(st.lists(st.text("xyz_", min_size=1, max_size=3), max_size=4))
def test_prefixes_of_prefixes_are_one_prefix(prefixes: list[str]) -> None:
    toolset = native("a", "b")
    for text in reversed(prefixes):
        toolset = prefix(toolset, text)
    assert names(toolset) == names(prefix(native("a", "b"), "".join(prefixes)))


@given(st.sets(st.sampled_from("abcd")), st.sets(st.sampled_from("abcd")))
def test_allowing_twice_allows_what_both_allow(one: set[str], other: set[str]) -> None:
    assert names(allow(allow(native(*"abcd"), one), other)) == names(allow(native(*"abcd"), one & other))


async def test_a_renamed_class_tool_is_created_and_rewarded_under_its_new_name() -> None:
    class Tool(BaseTool):
        async def create(self, instance_id: str | None = None, start: float = 0, **kwargs: object) -> str:  # type: ignore[override]
            self.start = start
            return str(instance_id)

        async def calc_reward(self, instance_id: str, **kwargs: object) -> float:
            return self.start

    schema = OpenAIFunctionToolSchema.model_validate({"function": {"name": "tool"}})
    toolset = Combined([prefix(NativeToolset([ClassTool(Tool({}, schema))]), "my_")])
    async with toolset, toolset.open(Task(create={"my_tool": {"start": 3}})) as session:
        assert await session.finish() == {"my_tool": 3.0}


def test_an_unchanged_listing_is_the_same_object() -> None:
    toolset = prefix(allow(native("a", "b"), ["a"]), "x_")
    assert toolset.specs is toolset.specs
