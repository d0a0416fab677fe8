"""What was rendered or encoded once is not worked out again, and is never another than it would be."""

from __future__ import annotations

from typing import Any

import pytest

from tests.trainer.conversations import template_for
from tests.trainer.scripts import HERMES
from trainer.ledger import Message
from trainer.template.chat import Chat
from trainer.template.known import Known
from trainer.template.template import Settings
from trainer.template.tokens import Tokens

TASK: tuple[Message, ...] = ({"role": "user", "content": "What is a gnu?"},)


def test_siblings_have_their_prompt_rendered_and_encoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    template, work = template_for(HERMES), []
    render, encode = Chat._text, Tokens._encode

    def rendered(*args: Any) -> str:
        work.append("render")
        return render(*args)

    def encoded(*args: Any) -> list[int]:
        work.append("encode")
        return encode(*args)

    monkeypatch.setattr(Chat, "_text", rendered)
    monkeypatch.setattr(Tokens, "_encode", encoded)
    opened = {template.open([dict(message) for message in TASK]) for _ in range(8)}
    assert work == ["render", "encode"]
    assert opened == {template_for(HERMES).open(TASK)}


def test_messages_that_differ_in_anything_have_texts_of_their_own() -> None:
    template = template_for(HERMES)
    tool = {"type": "function", "function": {"name": "look_up", "description": "", "parameters": {"type": "object"}}}
    asked: list[tuple[Any, ...]] = [(TASK, ()), (TASK, [tool]), ((*TASK, *TASK), ())]
    texts = [template.chat.text(*one, prompt=prompt) for one in asked for prompt in (False, True)]
    assert len(set(texts)) == len(texts)


def test_a_template_that_looks_at_a_clock_is_rendered_each_time() -> None:
    clocked = Settings(chat_template="{{ strftime_now('%f') }}{% for one in messages %}{{ one.content }}{% endfor %}")
    chat = template_for(HERMES).chat
    timed = Chat(chat.tokenizer, chat.tokens, clocked.chat_template, {})
    assert len({timed.text(TASK) for _ in range(50)}) > 1


def test_a_message_that_is_no_json_is_left_to_the_template() -> None:
    chat = template_for(HERMES).chat
    odd = {"role": "user", "content": "Why?", "seen": {1, 2}}
    assert chat.text([odd]) == chat.text([{"role": "user", "content": "Why?"}])


def test_no_more_is_kept_than_was_said_and_the_least_recently_asked_for_goes_first() -> None:
    made: list[str] = []

    def of(key: str) -> str:
        return known.of(key, lambda: made.append(key) or "four")  # type: ignore[func-returns-value]

    known: Known[str, str] = Known(most=8)
    assert [of(key) for key in "abacab"] == ["four"] * 6
    assert made == ["a", "b", "c", "b"]
    assert known.of("d", lambda: "longer than all") == "longer than all"
    assert not known._values
