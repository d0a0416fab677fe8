"""The render cache: nothing is rendered twice, and no cached text is wrong."""

from __future__ import annotations

from typing import Any

import pytest

from tests.trainer.conversations import make_template
from tests.trainer.policy_scripts import HERMES
from trainer.ledger import Message
from trainer.template import chat_template as chat_template
from trainer.template.chat_template import ChatTemplate
from trainer.template.template import Settings
from trainer.template.tokenizer import FencedTokenizer

TASK: tuple[Message, ...] = ({"role": "user", "content": "What is a gnu?"},)


def test_siblings_render_and_encode_their_prompt_once(monkeypatch: pytest.MonkeyPatch) -> None:
    template, work = make_template(HERMES), []
    render, encode = ChatTemplate._render, FencedTokenizer._encode

    def rendered(*args: Any) -> str:
        work.append("render")
        return render(*args)

    def encoded(*args: Any) -> list[int]:
        work.append("encode")
        return encode(*args)

    monkeypatch.setattr(ChatTemplate, "_render", rendered)
    monkeypatch.setattr(FencedTokenizer, "_encode", encoded)
    opened = {template.encode_prompt([dict(message) for message in TASK]) for _ in range(8)}
    assert work == ["render", "encode"]
    assert opened == {make_template(HERMES).encode_prompt(TASK)}


def test_template_that_uses_the_time_is_not_cached() -> None:
    clocked = Settings(chat_template="{{ strftime_now('%f') }}{% for one in messages %}{{ one.content }}{% endfor %}")
    chat = make_template(HERMES).chat
    timed = ChatTemplate(chat.hf_tokenizer, chat.tokenizer, clocked.chat_template, {})
    assert len({timed.render(TASK) for _ in range(50)}) > 1
