"""Tests of renaming, filtering and combining toolsets."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.errors import ConfigError
from gateway.native.base import BaseTool, OpenAIFunctionToolSchema
from gateway.native.function import FunctionTool
from gateway.native.native_toolset import ClassTool, NativeToolset
from gateway.toolset import (
    CombinedToolset,
    Session,
    Toolset,
    ToolsetWrapper,
    add_prefix,
    allow_only,
    hash_session_state,
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


async def test_allow_only_filters_specs_and_calls() -> None:
    toolset = allow_only(native("a", "b"), ["b"])
    assert names(toolset) == ["b"]
    assert (await call_text(toolset, "a"))[1] is Outcome.INVALID
    assert await call_text(toolset, "b") == ("b!", Outcome.OK)


async def test_combined_toolset_routes_calls_to_their_toolsets() -> None:
    toolset = CombinedToolset([native("a"), add_prefix(native("a"), "other_")])
    assert names(toolset) == ["a", "other_a"]
    assert await call_text(toolset, "other_a") == ("a!", Outcome.OK)
    assert (await call_text(toolset, "b"))[1] is Outcome.INVALID


async def test_combining_equal_names_raises() -> None:
    with pytest.raises(ConfigError, match="two tools are named 'a'"):
        async with CombinedToolset([native("a"), native("a")]):
            pass


class Stateful(ToolsetWrapper):
    """A toolset whose sessions end with a given state, if it is not empty."""

    def __init__(self, state: str) -> None:
        super().__init__(native())
        self.state = state

    @asynccontextmanager
    async def open(self, task: Task) -> AsyncIterator[Session]:
        async def hash_state() -> str | None:
            return self.state or None

        async with self.inner.open(task) as session:
            yield cast(Session, SimpleNamespace(specs=session.specs, finish=session.finish, hash_state=hash_state))


async def hash_combined(*states: str) -> str | None:
    toolset = CombinedToolset([Stateful(state) for state in states])
    async with toolset, toolset.open(Task()) as session:
        return await hash_session_state(session)


async def test_combined_session_has_the_hash_of_all_states() -> None:
    assert await hash_combined("", "") is None
    assert await hash_combined("", "sha256:a") == "sha256:a"
    both = await hash_combined("sha256:a", "sha256:b")
    assert both is not None and both.startswith("sha256:")
    assert both == await hash_combined("sha256:a", "", "sha256:b") != await hash_combined("sha256:b", "sha256:a")
    assert await hash_combined("sha256:a", "ended: it hangs") == "ended: it hangs"


@given(st.lists(st.text("xyz_", min_size=1, max_size=3), max_size=4))
def test_nested_prefixes_concatenate(prefixes: list[str]) -> None:
    toolset = native("a", "b")
    for text in reversed(prefixes):
        toolset = add_prefix(toolset, text)
    assert names(toolset) == names(add_prefix(native("a", "b"), "".join(prefixes)))


@given(st.sets(st.sampled_from("abcd")), st.sets(st.sampled_from("abcd")))
def test_nested_allow_only_intersects(first: set[str], second: set[str]) -> None:
    assert names(allow_only(allow_only(native(*"abcd"), first), second)) == names(
        allow_only(native(*"abcd"), first & second)
    )


async def test_renamed_class_tool_is_created_and_rewarded_by_its_new_name() -> None:
    class Tool(BaseTool):
        async def create(self, instance_id: str | None = None, start: float = 0, **kwargs: object) -> str:  # type: ignore[override]
            self.start = start
            return str(instance_id)

        async def calc_reward(self, instance_id: str, **kwargs: object) -> float:
            return self.start

    schema = OpenAIFunctionToolSchema.model_validate({"function": {"name": "tool"}})
    toolset = CombinedToolset([add_prefix(NativeToolset([ClassTool(Tool({}, schema))]), "my_")])
    async with toolset, toolset.open(Task(create={"my_tool": {"start": 3}})) as session:
        assert await session.finish() == {"my_tool": 3.0}


def test_unchanged_specs_are_the_same_object() -> None:
    toolset = add_prefix(allow_only(native("a", "b"), ["a"]), "x_")
    assert toolset.specs is toolset.specs
