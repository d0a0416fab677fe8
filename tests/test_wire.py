"""The wire's form: whatever is written is read back as it was."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.content import content, strict_messages
from gateway.types import Audio, Feedback, Image, Outcome, Part, Resource, Text, ToolCall, ToolResult, ToolSpec, Video
from gateway.wire import (
    WireError,
    dumps,
    feedback_json,
    feedback_of,
    part_json,
    part_of,
    result_json,
    result_of,
    spec_json,
    spec_of,
)

words = st.text(max_size=20)
maybe = st.none() | words
parts: st.SearchStrategy[Part] = st.one_of(
    st.builds(Text, words),
    st.builds(Image, st.binary(), words),
    st.builds(Audio, st.binary(), words),
    st.builds(Video, st.binary(), words),
    st.builds(Resource, words, maybe, maybe, st.none() | st.binary(), maybe, maybe),
)
values = st.dictionaries(words, st.none() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | words)
outcomes = st.sampled_from(Outcome)


@given(parts)
def test_a_part_survives_the_wire(part: Part) -> None:
    assert part_of(json.loads(dumps(part_json(part)))) == part


@given(
    st.builds(
        ToolResult,
        st.lists(parts).map(tuple),
        outcomes,
        reward=st.none() | st.floats(allow_nan=False, allow_infinity=False),
        done=st.booleans(),
        structured=values,
        metrics=values,
        reason=maybe,
        timing=st.dictionaries(words, st.floats(0, 9)),
        meta=values,
    )
)
def test_a_result_survives_the_wire(result: ToolResult) -> None:
    written = result_json(ToolCall("c", "tool"), result) | {"parts": [part_json(part) for part in result.parts]}
    assert result_of(json.loads(dumps(written))) == result


@given(st.builds(Feedback, st.lists(parts).map(tuple), st.floats(0, 1), st.booleans(), values, outcomes, maybe))
def test_feedback_survives_the_wire(heard: Feedback) -> None:
    written = feedback_json(heard) | {"parts": [part_json(part) for part in heard.parts]}
    assert feedback_of(json.loads(dumps(written))) == heard


@given(st.builds(ToolSpec, words, words, values, st.sampled_from(["policy", "loop"])))
def test_a_spec_survives_the_wire(spec: ToolSpec) -> None:
    assert spec_of(json.loads(dumps(spec_json(spec)))) == spec


@pytest.mark.parametrize(
    "value", [{}, {"type": "smell"}, {"type": "image", "data": "???", "mime": "image/png"}, {"type": "text", "text": 1}]
)
def test_what_is_no_part_is_refused(value: dict[str, object]) -> None:
    with pytest.raises(WireError):
        part_of(value)


def test_films_and_pictured_documents_are_shown_where_they_can_be() -> None:
    shown = content([Video(b"film"), Resource("file:///a.png", "image/png", data=b"picture")])
    assert [part["type"] for part in shown if isinstance(part, dict)] == ["video_url", "image_url"]
    (said,) = strict_messages([ToolCall("c", "tool")], [ToolResult((Video(b"film"),))])
    assert said["content"].startswith("[video: left out")
