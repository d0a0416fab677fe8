"""Turns that are read piece by piece: what is sent early is the beginning of what the whole turn is parsed as."""

from __future__ import annotations

import pytest

from gateway.types import ToolCall
from mtrl_plugins.agents.reply_stream import ReplyStream
from trainer.parse.hermes import Hermes
from trainer.parse.plain import PlainText


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


def test_parser_of_a_user_and_a_plain_turn() -> None:
    class Own(Hermes):
        def parse(self, text):  # type: ignore[no-untyped-def]
            return super().parse(text.upper())

    own, plain = ReplyStream(Own()), ReplyStream(PlainText())
    for stream in (own, plain):
        stream.feed("so ")
    assert (own.content, plain.content) == ("", "so ")
