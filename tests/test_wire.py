"""Tests of the JSON encoding: what JSON lacks, parts of chats, and large values, written in small steps."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from json import JSONEncoder
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway import large_json
from gateway.chat_messages import chat_content, strict_tool_messages
from gateway.large_json import is_large, write_json
from gateway.types import Feedback, Resource, Task, ToolCall, ToolResult, Video
from gateway.wire import (
    dumps,
    dumps_large,
    feedback_to_json,
    part_from_json,
    result_to_json,
    task_to_json,
    to_plain,
)
from tests.toolset_conformance.sample_tools import NOT_JSON


@pytest.mark.parametrize("make", [make for make, _ in NOT_JSON] + [lambda: math.nan, lambda: 1e22, lambda: "\ud83d"])
def test_small_and_large_values_that_json_lacks_are_written_alike(make: Callable[[], Any]) -> None:
    value = {"value": make(), "again": [make()]}
    plain = json.loads(dumps_large(to_plain(value)))
    encoded = (
        result_to_json(ToolCall("c", "tool"), ToolResult(structured=value, metrics=value, meta=value)),
        feedback_to_json(Feedback(metadata=value)),
        task_to_json(Task(create={"tool": value}, feedback_args=value)),
    )
    for fields in encoded:
        assert dumps(fields) == dumps_large(fields)
    result, feedback, task = (json.loads(dumps(fields)) for fields in encoded)
    assert [result["structured"], result["metrics"], result["meta"], feedback["metadata"]] == [plain] * 4
    assert [task["create"]["tool"], task["feedback_args"]] == [plain] * 2


@pytest.mark.parametrize(
    "value", [{}, {"type": "smell"}, {"type": "image", "data": "???", "mime": "image/png"}, {"type": "text", "text": 1}]
)
def test_invalid_part_is_refused(value: dict[str, object]) -> None:
    with pytest.raises(ValueError):
        part_from_json(value)


def test_videos_and_image_resources_in_chat_layouts() -> None:
    shown = chat_content([Video(b"film"), Resource("file:///a.png", "image/png", data=b"picture")])
    assert [part["type"] for part in shown if isinstance(part, dict)] == ["video_url", "image_url"]
    (messages,) = strict_tool_messages([ToolCall("c", "tool")], [ToolResult((Video(b"film"),))])
    assert messages["content"].startswith("[video: omitted")


KEYS = st.text(max_size=30) | st.integers() | st.booleans() | st.none()
LARGE_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=40),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(KEYS, inner, max_size=5),
    max_leaves=30,
)


@given(LARGE_VALUES)
def test_large_values_are_written_as_the_standard_library_writes_them(value: object) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(large_json, "PIECE_LENGTH", 7)
        patch.setattr(is_large, "__defaults__", (60,))
        assert write_json(JSONEncoder(separators=(",", ":")), value) == json.dumps(value, separators=(",", ":"))
        assert write_json(JSONEncoder(ensure_ascii=False), value) == json.dumps(value, ensure_ascii=False)
