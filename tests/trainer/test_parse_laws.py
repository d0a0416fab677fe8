"""What holds for every family, whatever a policy writes."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.types import ToolCall
from trainer.parse.choose import NAMES
from trainer.parse.family import MAX_PROBLEMS, Family, Marked

FAMILIES = sorted(set(NAMES.values()), key=lambda family: family.name)
FIELDS = ("qwen3_coder", "glm")
"""Families whose arguments are fields: values that a tag could end cannot be written."""
ENDS = ("<|end|>", "<|call|>", "<|return|>")

every_family = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)


def _opening(family: type[Family]) -> tuple[str, str]:
    if issubclass(family, Marked):
        return next(iter(family.thoughts.items()))
    return "<|channel|>analysis<|message|>", "<|end|>"


def _pieces(family: type[Family]) -> list[str]:
    """What texts that look like a family's own are made of."""
    call = family().render([ToolCall("", "look_up", '{"word": "gnu"}')])
    marks = [*family.opens, *family.closes, *family.silent] if issubclass(family, Marked) else [*ENDS, "<|start|>"]
    return [
        *marks, *_opening(family), call, call[: len(call) // 2], call[len(call) // 2 :], "<|message|>", "<function=x>",
        "[ARGS]", "[CALL_ID]", "<|tool_call_argument_begin|>", "<arg_key>", "</arg_key>", "<arg_value>",
        "</function>", "<parameter=a>", "</parameter>", "```json",
        "functions.a:0", "commentary to=functions.a", "{", "}", "[", "]", '"',
        '{"name": "a", ', '"arguments": {}', '"parameters": {}', ":", ",", ";", "\\", "1e99", "NaN", " ", "\n", "name",
    ]  # fmt: skip


def _texts(family: type[Family]) -> st.SearchStrategy[str]:
    pieces = st.sampled_from(_pieces(family)) | st.text(max_size=8)
    return st.lists(pieces, max_size=24).map("".join)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**30), 10**30) | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(codec="utf-8")),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=12,
)  # fmt: skip
TOOL_NAMES = st.from_regex(r"[a-zA-Z_][a-zA-Z0-9_.-]{0,40}", fullmatch=True)
KEYS = st.from_regex(r"[a-zA-Z_][a-zA-Z0-9_ -]{0,20}", fullmatch=True)


@every_family
@settings(deadline=None)
@given(data=st.data(), opened=st.booleans())
def test_no_text_raises_and_what_comes_of_it_is_bounded_and_sound(
    family: type[Family], data: st.DataObject, opened: bool
) -> None:
    text = data.draw(_texts(family) | st.text())
    reply = family(thinking_open=opened).parse(text)
    assert len(reply.problems) <= MAX_PROBLEMS
    assert all(len(problem) < 1000 for problem in reply.problems)
    for call in reply.calls:
        json.loads(call.arguments)
        assert call.name.isprintable()
        assert call.name in text or call.name.encode("ascii", "backslashreplace").decode() in text


@every_family
@settings(deadline=None)
@given(data=st.data())
def test_what_is_written_within_reasoning_is_never_a_call(family: type[Family], data: st.DataObject) -> None:
    opening, closing = _opening(family)
    thought = data.draw(_texts(family))
    for end in (closing, *(ENDS if family.name == "harmony" else ())):
        thought = thought.replace(end, "")
    thought = thought.rstrip("</|[")  # or it could make a closing tag of what follows
    call = family().render([ToolCall("", "look_up", "{}")])
    assert family().parse(opening + thought + call.replace(ENDS[1], "")).calls == ()
    assert family(thinking_open=True).parse(thought + call.replace(ENDS[1], "")).calls == ()
    tail = call if family.name != "harmony" else f"<|start|>assistant{call}"
    for text, parser in (
        (opening + thought + closing + tail, family()),
        (thought + closing + tail, family(thinking_open=True)),
        (opening + thought + closing + tail, family(thinking_open=True)),
    ):
        reply = parser.parse(text)
        assert [(made.name, made.arguments) for made in reply.calls] == [("look_up", "{}")]
        assert reply.problems == ()


@pytest.mark.parametrize("family", [one for one in FAMILIES if issubclass(one, Marked)], ids=lambda family: family.name)
def test_reasoning_whose_beginning_nobody_saw_takes_the_calls_before_its_end_with_it(family: type[Family]) -> None:
    _, closing = _opening(family)
    call = family().render([ToolCall("", "look_up", "{}")])
    reply = family().parse(f"{call} Or not: {call[:-3]}{closing}4")
    assert (reply.calls, reply.problems, reply.content) == ((), (), "4")
    assert call in reply.reasoning


@every_family
@settings(deadline=None)
@given(data=st.data(), opened=st.booleans())
def test_a_rendered_call_is_read_as_the_same_call(family: type[Family], data: st.DataObject, opened: bool) -> None:
    values = JSON if family.name not in FIELDS else JSON.filter(lambda value: "<" not in json.dumps(value))
    made = data.draw(st.dictionaries(TOOL_NAMES, st.dictionaries(KEYS, values, max_size=5), min_size=1, max_size=3))
    schemas = {name: {"properties": {key: _typed(item) for key, item in row.items()}} for name, row in made.items()}
    calls = [ToolCall("", name, json.dumps(row, ensure_ascii=False)) for name, row in made.items()]
    start = "<|start|>assistant" if family.name == "harmony" else ""
    thought = "Hm." + _opening(family)[1] + start if opened else ""
    reply = family(schemas, thinking_open=opened).parse(thought + family().render(calls))
    assert (reply.problems, reply.content, reply.reasoning) == ((), "", "Hm." if opened else "")
    assert [(call.name, json.loads(call.arguments)) for call in reply.calls] == list(made.items())
    if family.name not in FIELDS:
        assert [call.arguments for call in reply.calls] == [call.arguments for call in calls]


def _typed(value: Any) -> dict[str, str]:
    kinds = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
    return {"type": kinds.get(type(value), "null")}


def _lines(parse: Callable[[], object]) -> int:
    """How many lines of Python it takes."""
    count = 0

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal count
        count += 1
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        parse()
    finally:
        sys.settrace(before)
    return count


@every_family
def test_work_grows_no_faster_than_the_text(family: type[Family]) -> None:
    for piece in _pieces(family):
        short, long = (piece * (size // len(piece)) for size in (2_000, 8_000))
        assert _lines(lambda text=long: family().parse(text)) <= 5 * _lines(  # type: ignore[misc]
            lambda text=short: family().parse(text)  # type: ignore[misc]
        )


class _Counted(str):
    """A text that counts how much of it is copied or searched, so that work in C is counted, too."""

    seen: int

    def __new__(cls, text: str) -> _Counted:
        made = super().__new__(cls, text)
        made.seen = 0
        return made

    def find(self, word: str, start: int = 0) -> int:  # type: ignore[override]
        found = super().find(word, start)
        self.seen += (found if found >= 0 else len(self)) - start
        return found

    def __getitem__(self, place: Any) -> str:
        piece = super().__getitem__(place)
        self.seen += len(piece)
        return piece


@every_family
def test_a_megabyte_of_malice_is_read_in_a_few_passes(family: type[Family]) -> None:
    for piece in _pieces(family):
        text = _Counted(piece * (1_000_000 // len(piece)))
        reply = family().parse(text)
        assert len(reply.problems) <= MAX_PROBLEMS
        assert text.seen <= (MAX_PROBLEMS + 6) * len(text)
