"""The render cache: nothing is rendered twice, and no cached text is wrong."""

from __future__ import annotations

from typing import Any

import pytest

from tests.trainer.conversations import make_template
from tests.trainer.policy_scripts import HERMES
from trainer.ledger import Message
from trainer.template import chat_template as chat_template
from trainer.template.chat_template import ChatTemplate
from trainer.template.render_cache import IdentityCache, RenderCache
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


def test_cache_by_identity_is_correct_and_bounded() -> None:
    made: list[str] = []
    sizes: IdentityCache[list[int], int] = IdentityCache(lambda one: made.append("made") or len(one), max_entries=2)  # type: ignore[func-returns-value]
    few, many = [1], [1, 2, 3]
    assert [sizes.get(one) for one in (few, many, few, many)] == [1, 3, 1, 3] and len(made) == 2
    assert sizes.get([1, 2]) == 2 and len(sizes._results) == 1
    assert sizes.get(few) == 1 and len(made) == 4


def test_template_that_uses_the_time_is_not_cached() -> None:
    clocked = Settings(chat_template="{{ strftime_now('%f') }}{% for one in messages %}{{ one.content }}{% endfor %}")
    chat = make_template(HERMES).chat
    timed = ChatTemplate(chat.hf_tokenizer, chat.tokenizer, clocked.chat_template, {})
    assert len({timed.render(TASK) for _ in range(50)}) > 1


def test_cache_is_bounded_and_evicts_the_least_recently_used() -> None:
    made: list[str] = []

    def of(key: str) -> str:
        return known.get(key, lambda: made.append(key) or "four")  # type: ignore[func-returns-value]

    known: RenderCache[str, str] = RenderCache(max_size=8)
    assert [of(key) for key in "abacab"] == ["four"] * 6
    assert made == ["a", "b", "c", "b"]
    assert known.get("d", lambda: "longer than all") == "longer than all"
    assert not known._values
