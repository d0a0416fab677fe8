"""What was rendered or encoded once is not worked out again, and is never another than it would be."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.types import ToolSpec
from tests.trainer.conversations import template_for
from tests.trainer.scripts import HERMES
from trainer.ledger import Message
from trainer.template import chat
from trainer.template.chat import Chat
from trainer.template.known import Known, Same
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


def test_tools_are_written_out_once_whatever_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    template, work = template_for(HERMES), []
    tools = [ToolSpec("look_up", "Looks up a word."), ToolSpec("add", "Adds.")]
    written = chat.schema

    def schema(tool: chat.Tool) -> Any:
        work.append(tool)
        return written(tool)

    monkeypatch.setattr(chat, "schema", schema)
    texts = [template.chat.text([{"role": "user", "content": word}], tools) for word in ("gnu", "gnat")]
    assert len(work) == 2 * len(tools), "to be asked by, and to be fenced"
    assert texts == [
        template_for(HERMES).chat.text([{"role": "user", "content": word}], [schema(tool) for tool in tools])
        for word in ("gnu", "gnat")
    ]


def test_a_schema_that_its_owner_changes_is_read_anew() -> None:
    known, tool = template_for(HERMES).chat, {"type": "function", "function": {"name": "add", "parameters": {}}}
    before = known.text(TASK, [tool])
    tool["function"]["description"] = "Adds."  # type: ignore[index]
    assert "Adds." in known.text(TASK, [tool]) and "Adds." not in before


def test_what_is_known_of_an_object_is_not_that_of_another_and_no_more_is_kept_than_was_said() -> None:
    made: list[str] = []
    sizes: Same[list[int], int] = Same(lambda one: made.append("made") or len(one), most=2)  # type: ignore[func-returns-value]
    few, many = [1], [1, 2, 3]
    assert [sizes.of(one) for one in (few, many, few, many)] == [1, 3, 1, 3] and len(made) == 2
    assert sizes.of([1, 2]) == 2 and len(sizes._values) == 1
    assert sizes.of(few) == 1 and len(made) == 4


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
