"""A history is kept whole, or is what inference would show; which one is a setting."""

from __future__ import annotations

import pytest

from tests.trainer.conversations import TASK, TOOL, asks, calls, replies, says, template_for
from tests.trainer.tokenizers_for_tests import FAMILIES
from trainer.ledger import Author, Entry, Ledger, Message
from trainer.template import Settings, Template, drifts, written
from trainer.template.chat import Chat
from trainer.template.tokens import Tokens

HERMES = FAMILIES["hermes"]


def _ledger(template: Template, *turns: tuple[str, str]) -> Ledger:
    ledger = Ledger((Entry(Author.TASK, template.open(TASK), TASK),))
    for thought, word in turns:
        if ledger.turns:
            after = ({"role": "user", "content": "Really?"},)
            ledger += Entry(Author.FEEDBACK, template.tail(after, ended=True), after)
        ids = template.tokens.encode(f"<think>\n{thought}\n</think>\n\n{word}<|im_end|>")
        turn = {**says(word), "reasoning_content": thought}
        ledger += Entry(Author.POLICY, ids, (turn,), logprobs=(0.0,) * len(ids), stop="stop")
    return ledger


AFTER: tuple[Message, ...] = ({"role": "user", "content": "Why?"},)


def asked(template: Template, ledger: Ledger, after: tuple[Message, ...] = AFTER) -> Ledger:
    """Answered, up to where the policy writes again."""
    ids = template.tail(after, ended=template.ended(ledger.ids))
    return ledger + Entry(Author.FEEDBACK, ids, after)


def test_a_full_history_goes_on_in_the_same_ledger() -> None:
    template = template_for(FAMILIES["qwen3"])
    assert template.anew(asked(template, _ledger(template, ("Hm.", "A gnu.")))) is None


def test_a_history_as_at_inference_begins_anew_where_reasoning_is_taken_away() -> None:
    template = template_for(FAMILIES["qwen3"], Settings(history="inference_template"))
    ledger = _ledger(template, ("Hm.", "A gnu."))
    ids = template.anew(asked(template, ledger))
    assert ids is not None and ids == template.open([*ledger.messages, *AFTER])
    text = template.tokens.decode(ids)
    assert "A gnu." in text and "Hm." not in text


def test_a_ledger_that_begins_anew_is_the_full_render() -> None:
    template = template_for(FAMILIES["qwen3"], Settings(history="inference_template"))
    before = asked(template, _ledger(template, ("Hm.", "A gnu.")))
    ledger = Ledger((Entry(Author.TASK, template.anew(before) or (), before.messages),))
    ids = template.tokens.encode("<think>\nSo.\n</think>\n\nBecause.<|im_end|>")
    turn = {**says("Because."), "reasoning_content": "So."}
    ledger += Entry(Author.POLICY, ids, (turn,), logprobs=(0.0,) * len(ids), stop="stop")
    assert drifts(template, ledger) == ()
    assert sum(ledger.mask) == len(ids)


def test_a_turn_costs_what_is_new_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    work = []

    def counted(tokens: Tokens, text: str, after: str = "") -> tuple[int, ...]:
        work.append(len(text))
        return ()

    monkeypatch.setattr(Tokens, "encode", counted)
    render = Chat._text
    monkeypatch.setattr(Chat, "_text", lambda *args: work.append(len(args[1])) or render(*args))
    turn = Entry(Author.POLICY, (1, 2), (says("A gnu."),), logprobs=(0.0, 0.0), stop="stop")
    first, second = template_for(HERMES), template_for(HERMES)
    costs = []
    for length, template in ((1, first), (200, second)):
        work.clear()
        ledger = Ledger((turn,) * length)
        template.tail(AFTER, ended=template.ended(ledger.entries[-1].ids))
        assert template.anew(ledger) is None
        costs.append(list(work))
    assert costs[0] == costs[1]


def test_a_history_as_at_inference_goes_on_where_nothing_is_taken_away() -> None:
    template = template_for(FAMILIES["qwen3"], Settings(history="inference_template"))
    ledger = Ledger((Entry(Author.TASK, template.open(TASK, [TOOL]), TASK),))
    turn = {**asks(calls("gnu")), "reasoning_content": "Hm."}
    ids = written(template, TASK, turn, [TOOL])
    ledger += Entry(Author.POLICY, ids, (turn,), logprobs=(0.0,) * len(ids), stop="stop")
    after = replies(calls("gnu"), "found")
    assert template.anew(asked(template, ledger, after), [TOOL]) is None


def test_what_the_policy_wrote_in_tokens_of_its_own_choice_is_not_taken_back() -> None:
    template = template_for(HERMES, Settings(history="inference_template"))
    ledger = Ledger((Entry(Author.TASK, template.open(TASK), TASK),))
    ids = tuple(id for char in "A gnu." for id in template.tokens.encode(char)) + template.stop_ids[:1]
    assert ids != written(template, TASK, says("A gnu."))
    ledger += Entry(Author.POLICY, ids, (says("A gnu."),), logprobs=(0.0,) * len(ids), stop="stop")
    assert template.anew(asked(template, ledger)) is None
