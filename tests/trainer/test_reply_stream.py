"""Turns that are read piece by piece: what is sent early is the beginning of what the whole turn is parsed as."""

from __future__ import annotations

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from gateway.types import ToolCall
from tests.trainer.test_parse_properties import _texts, every_family
from trainer.parse.base import CallParser, MarkedParser, _ParseRun
from trainer.parse.gemma4 import Gemma4
from trainer.parse.hermes import Hermes
from trainer.parse.llama3 import Llama3
from trainer.parse.plain import PlainText
from trainer.parse.reply_stream import ReplyStream


def feed_all(stream: ReplyStream, text: str, cuts: list[int]) -> None:
    """Feeds a text in pieces; what was known stays as it is."""
    for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
        before = stream.content, stream.reasoning
        stream.feed(text[start:end])
        assert stream.content.startswith(before[0]) and stream.reasoning.startswith(before[1])


@every_family
@settings(deadline=None)
@given(data=st.data(), opened=st.booleans())
def test_what_is_known_early_begins_the_parsed_turn(
    family: type[CallParser], data: st.DataObject, opened: bool
) -> None:
    parser = family(thinking_open=opened)
    text = data.draw(_texts(family) | st.text())
    assume(not has_lone_closing_tag(parser, text))
    reply = parser.parse(text)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    stream = ReplyStream(parser)
    feed_all(stream, text, cuts)
    assert reply.content.startswith(stream.content)
    assert reply.reasoning.startswith(stream.reasoning)


def has_lone_closing_tag(parser: CallParser, text: str) -> bool:
    """Whether a closing tag without an opening one turns what came before into reasoning."""
    if not isinstance(parser, MarkedParser):
        return False
    run = _ParseRun(parser, text)
    run.run()
    return bool(run.reasoning_end)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 100])
def test_text_is_known_as_it_comes_and_marks_never_are(size: int) -> None:
    call = Hermes().render([ToolCall("", "add", "{}")])
    text = f"<think>\nSum them.\n</think>\n\nI add: a < b. \n{call}"
    stream, seen = ReplyStream(Hermes()), []
    for start in range(0, len(text), size):
        stream.feed(text[start : start + size])
        seen.append(stream.content)
    assert (stream.reasoning, stream.content) == ("Sum them.", "I add: a < b.")
    assert size > 3 or len(set(seen)) > 4


def test_everything_that_can_become_a_mark_is_held_back() -> None:
    stream = ReplyStream(Hermes())
    for text, known in (("a <tool", "a"), ("_cal", "a"), ("m> b ", "a <tool_calm> b"), ("<", "a <tool_calm> b")):
        stream.feed(text)
        assert stream.content == known


def test_longer_mark_is_waited_for() -> None:
    stream = ReplyStream(Gemma4())
    stream.feed("<|channel>")
    stream.feed("thought\nHm.<channel|>yes")
    assert (stream.reasoning, stream.content) == ("Hm.", "yes")


def test_object_at_the_start_may_be_a_call_of_llama() -> None:
    calling, plain = ReplyStream(Llama3()), ReplyStream(Llama3())
    calling.feed(' {"na')
    plain.feed('so: {"na')
    assert (calling.content, plain.content) == ("", 'so: {"na')


def test_parser_of_a_user_and_a_plain_turn() -> None:
    class Own(Hermes):
        def parse(self, text):  # type: ignore[no-untyped-def]
            return super().parse(text.upper())

    own, plain = ReplyStream(Own()), ReplyStream(PlainText())
    for stream in (own, plain):
        stream.feed("so ")
    assert (own.content, plain.content) == ("", "so ")
