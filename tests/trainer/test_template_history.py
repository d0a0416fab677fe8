"""The setting `history`: the full history, or the one that inference would show."""

from __future__ import annotations

import pytest

from tests.trainer.conversations import TASK, make_template, text_turn
from tests.trainer.tokenizer_families import FAMILIES
from trainer.ledger import Author, Entry, Ledger, Message
from trainer.template import Settings, Template, render_reply
from trainer.template.chat_template import ChatTemplate
from trainer.template.tokenizer import FencedTokenizer

HERMES = FAMILIES["hermes"]


AFTER: tuple[Message, ...] = ({"role": "user", "content": "Why?"},)


def asked(template: Template, ledger: Ledger, after: tuple[Message, ...] = AFTER) -> Ledger:
    """Answered, up to where the policy writes again."""
    ids = template.encode_tail(after, ended=template.is_turn_ended(ledger.ids))
    return ledger + Entry(Author.FEEDBACK, ids, after)


def test_rendering_a_turn_costs_only_its_new_part(monkeypatch: pytest.MonkeyPatch) -> None:
    work = []

    def counted(tokens: FencedTokenizer, text: str, after: str = "") -> tuple[int, ...]:
        work.append(len(text))
        return ()

    monkeypatch.setattr(FencedTokenizer, "encode", counted)
    render = ChatTemplate._render
    monkeypatch.setattr(ChatTemplate, "_render", lambda *args: work.append(len(args[1])) or render(*args))
    turn = Entry(Author.POLICY, (1, 2), (text_turn("A gnu."),), logprobs=(0.0, 0.0), finish_reason="stop")
    first, second = make_template(HERMES), make_template(HERMES)
    costs = []
    for length, template in ((1, first), (200, second)):
        work.clear()
        ledger = Ledger((turn,) * length)
        template.encode_tail(AFTER, ended=template.is_turn_ended(ledger.entries[-1].ids))
        assert template.rerender_prompt(ledger) is None
        costs.append(list(work))
    assert costs[0] == costs[1]


def test_unusual_tokenisation_of_the_policy_is_kept() -> None:
    template = make_template(HERMES, Settings(history="inference_template"))
    ledger = Ledger((Entry(Author.TASK, template.encode_prompt(TASK), TASK),))
    ids = tuple(id for char in "A gnu." for id in template.tokenizer.encode(char)) + template.stop_ids[:1]
    assert ids != render_reply(template, TASK, text_turn("A gnu."))
    ledger += Entry(Author.POLICY, ids, (text_turn("A gnu."),), logprobs=(0.0,) * len(ids), finish_reason="stop")
    assert template.rerender_prompt(asked(template, ledger)) is None
