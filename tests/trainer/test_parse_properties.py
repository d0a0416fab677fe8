"""Properties of every tool-call parser for arbitrary text."""

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
from trainer.parse.base import MAX_PROBLEMS, CallParser, MarkedParser
from trainer.parse.choose import PARSERS, find_parser_class

FAMILIES = sorted(
    {family for family in map(find_parser_class, PARSERS) if issubclass(family, CallParser)},
    key=lambda family: family.name,
)
FIELDS = ("qwen3_coder", "glm", "minimax", "muse")
"""Families whose arguments are fields: values that a tag could end cannot be written."""
BARE_KEYS = ("lfm2", "gemma4")
"""Families that write an argument's name without quotes, where white space around it means nothing."""
MESSAGES = {
    "harmony": ("<|channel|>analysis<|message|>", ("<|end|>", "<|call|>", "<|return|>")),
    "muse": (" to=self<|message|>", ("<|eom|>", "<|eot|>", "<|start|>")),
}
"""Families whose turns are several messages: how reasoning begins, and what ends a message."""
START = "<|start|>assistant"

every_family = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)


def _opening(family: type[CallParser]) -> tuple[str, str]:
    if issubclass(family, MarkedParser):
        return next(iter(family.reasoning_tags.items()))
    opening, ends = MESSAGES[family.name]
    return opening, ends[0]


def _without_end(family: type[CallParser], call: str) -> str:
    """The call as it stands in a message that is not over."""
    for end in MESSAGES[family.name][1] if family.name in MESSAGES else ():
        call = call.replace(end, "")
    return call


def _pieces(family: type[CallParser]) -> list[str]:
    """What texts that look like a family's own are made of."""
    call = family().render([ToolCall("", "look_up", '{"word": "gnu"}')])
    marks = (
        [*family.openers, *family.closers, *family.ignored_marks]
        if issubclass(family, MarkedParser)
        else [*MESSAGES[family.name][1], "<|start|>"]
    )
    return [
        *marks, *_opening(family), call, call[: len(call) // 2], call[len(call) // 2 :], "<|message|>", "<function=x>",
        "[ARGS]", "[CALL_ID]", "<|tool_call_argument_begin|>", "<arg_key>", "</arg_key>", "<arg_value>",
        "</function>", "<parameter=a>", "</parameter>", "```json", "a(b=", "'x'", "call:a{b:", '<|"|>',
        '<invoke name="a">', '<parameter name="b">', "</invoke>", " to=a<|message|>", "<atem:function_calls>",
        "functions.a:0", "commentary to=functions.a", "{", "}", "[", "]", '"',
        '{"name": "a", ', '"arguments": {}', '"parameters": {}', ":", ",", ";", "\\", "1e99", "NaN", " ", "\n", "name",
    ]  # fmt: skip


def _texts(family: type[CallParser]) -> st.SearchStrategy[str]:
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
def test_any_text_is_parsed_without_errors_into_a_bounded_reply(
    family: type[CallParser], data: st.DataObject, opened: bool
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
def test_text_within_reasoning_is_never_a_call(family: type[CallParser], data: st.DataObject) -> None:
    opening, closing = _opening(family)
    thought = data.draw(_texts(family))
    for end in (closing, *MESSAGES.get(family.name, ("", ()))[1]):
        thought = thought.replace(end, "")
    thought = thought.rstrip("</|[")  # or it could make a closing tag of what follows
    call = family().render([ToolCall("", "look_up", "{}")])
    assert family().parse(opening + thought + _without_end(family, call)).calls == ()
    assert family(thinking_open=True).parse(thought + _without_end(family, call)).calls == ()
    tail = call if family.name not in MESSAGES else f"{START}{call}"
    for text, parser in (
        (opening + thought + closing + tail, family()),
        (thought + closing + tail, family(thinking_open=True)),
        (opening + thought + closing + tail, family(thinking_open=True)),
    ):
        reply = parser.parse(text)
        assert [(made.name, made.arguments) for made in reply.calls] == [("look_up", "{}")]
        assert reply.problems == ()


@pytest.mark.parametrize(
    "family", [one for one in FAMILIES if issubclass(one, MarkedParser)], ids=lambda family: family.name
)
def test_calls_before_a_lone_closing_tag_are_reasoning(family: type[CallParser]) -> None:
    _, closing = _opening(family)
    call = family().render([ToolCall("", "look_up", "{}")])
    reply = family().parse(f"{call} Or not: {call[:-3]}{closing}4")
    assert (reply.calls, reply.problems, reply.content) == ((), (), "4")
    assert call in reply.reasoning


@every_family
@settings(deadline=None)
@given(data=st.data(), opened=st.booleans())
def test_rendered_call_is_parsed_as_the_same_call(family: type[CallParser], data: st.DataObject, opened: bool) -> None:
    values = JSON if family.name not in FIELDS else JSON.filter(lambda value: "<" not in json.dumps(value))
    keys = KEYS.filter(lambda key: key == key.strip()) if family.name in BARE_KEYS else KEYS
    made = data.draw(st.dictionaries(TOOL_NAMES, st.dictionaries(keys, values, max_size=5), min_size=1, max_size=3))
    schemas = {name: {"properties": {key: _typed(item) for key, item in row.items()}} for name, row in made.items()}
    calls = [ToolCall("", name, json.dumps(row, ensure_ascii=False)) for name, row in made.items()]
    start = START if family.name in MESSAGES else ""
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
def test_parsing_time_is_linear(family: type[CallParser]) -> None:
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
def test_hostile_text_is_parsed_in_few_passes(family: type[CallParser]) -> None:
    for piece in _pieces(family):
        text = _Counted(piece * (50_000 // len(piece)))
        reply = family().parse(text)
        assert len(reply.problems) <= MAX_PROBLEMS
        assert text.seen <= (MAX_PROBLEMS + 6) * len(text)
