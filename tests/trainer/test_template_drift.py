"""Every difference between a ledger and a full render is told once, with its cause and both texts."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest

from tests.trainer.conversations import TASK, TOOL, asks, calls, replies, says, template_for
from tests.trainer.tokenizers_for_tests import FAMILIES
from trainer.ledger import Author, Entry, Ledger, Message
from trainer.template import Cause, Drift, Settings, Template, drifts, written
from trainer.template.template import Sanity

HERMES = FAMILIES["hermes"]


def _wrote(template: Template, text: str, turn: Message, stop: str = "stop") -> Entry:
    ids = template.tokens.encode(text)
    return Entry(Author.POLICY, ids, (turn,), logprobs=(0.0,) * len(ids), stop=stop)


def _opened(template: Template) -> Ledger:
    return Ledger((Entry(Author.TASK, template.open(TASK, [TOOL]), TASK),))


def _asked(template: Template, ledger: Ledger, after: Sequence[Message]) -> Ledger:
    ended = template.ended(ledger.ids)
    return ledger + Entry(Author.TOOL, template.tail(after, ended=ended), tuple(after))


def _why(template: Template) -> tuple[Message, ...]:
    return ({"role": "user", "content": "Why?"},)


def test_a_ledger_that_is_the_full_render_has_no_drift() -> None:
    template = template_for(HERMES)
    ledger = _opened(template) + _wrote(template, "A gnu.<|im_end|>", says("A gnu."))
    ledger = _asked(template, ledger, _why(template))
    assert drifts(template, ledger, [TOOL]) == ()
    assert drifts(template, ledger + _wrote(template, "So.<|im_end|>", says("So.")), [TOOL]) == ()


def test_a_turn_without_its_end_is_no_drift_where_it_is_the_last() -> None:
    template = template_for(HERMES)
    ledger = _opened(template) + _wrote(template, "A gn", says("A gn"), stop="length")
    assert drifts(template, ledger, [TOOL]) == ()


def test_white_space_is_told_unless_it_is_to_be_ignored() -> None:
    template = template_for(HERMES)
    ledger = _opened(template) + _wrote(template, "A gnu.\n <|im_end|>", says("A gnu."))
    (drift,) = drifts(template, ledger, [TOOL])
    assert drift.cause is Cause.WHITESPACE and not drift.harmless
    assert drift.at == len(template.open(TASK, [TOOL]))
    ignoring = template_for(HERMES, Settings(sanity="ignore_strippable"))
    assert drifts(ignoring, ledger, [TOOL]) == ()


@pytest.mark.parametrize("sanity", ["strict", "ignore_strippable", "disable"])
def test_only_a_disabled_check_keeps_silent_about_other_words(sanity: Sanity) -> None:
    template = template_for(HERMES, Settings(sanity=sanity))
    ledger = _opened(template) + _wrote(template, "A gnu.<|im_end|>", says("A goat."))
    found = drifts(template, ledger, [TOOL])
    assert [drift.cause for drift in found] == ([] if sanity == "disable" else [Cause.OTHER])
    if found:
        assert "goat" in str(found[0]) and "gnu" in str(found[0])


def test_a_call_in_other_json_is_reformatted() -> None:
    template = template_for(HERMES)
    text = '<tool_call>\n{"name":"look_up","arguments":{"word":"gnu"}}\n</tool_call><|im_end|>'
    ledger = _opened(template) + _wrote(template, text, asks(calls("gnu")))
    ledger = _asked(template, ledger, replies(calls("gnu"), "found"))
    (drift,) = drifts(template, ledger, [TOOL])
    assert drift.cause is Cause.ARGUMENTS_REFORMATTED and drift.harmless


def test_another_call_is_not_a_reformatted_one() -> None:
    template = template_for(HERMES)
    text = '<tool_call>\n{"name": "look_up", "arguments": {"word": "emu"}}\n</tool_call><|im_end|>'
    ledger = _opened(template) + _wrote(template, text, asks(calls("gnu")))
    assert [drift.cause for drift in drifts(template, ledger, [TOOL])] == [Cause.OTHER]


@pytest.mark.parametrize("name", ["qwen3", "qwq"])
def test_reasoning_that_the_template_takes_away_is_told_as_such(name: str) -> None:
    template = template_for(FAMILIES[name])
    turn = {**says("A gnu."), "reasoning_content": "Hm."}
    text = "<think>\nHm.\n</think>\n\nA gnu.<|im_end|>".removeprefix(template.opened)
    ledger = _asked(template, _opened(template) + _wrote(template, text, turn), _why(template))
    (drift,) = drifts(template, ledger, [TOOL])
    assert drift.cause is Cause.REASONING_STRIPPED and drift.harmless
    assert "Hm." in drift.got and "Hm." not in drift.expected


def test_a_call_that_was_cut_off_is_truncated() -> None:
    template = template_for(HERMES)
    ledger = _opened(template) + _wrote(template, 'Well. <tool_call>\n{"na', says("Well."), stop="length")
    ledger = _asked(template, ledger, _why(template))
    (drift,) = drifts(template, ledger, [TOOL])
    assert drift.cause is Cause.TRUNCATED and drift.harmless


def test_the_same_text_in_other_tokens_is_retokenised() -> None:
    template = template_for(HERMES)
    letters = [id for letter in "arguments" for id in template.tokens.encode(letter)]
    ids = (*letters, template.stop_ids[0])
    assert template.tokens.encode("arguments") != tuple(letters)
    turn = Entry(Author.POLICY, ids, (says("arguments"),), logprobs=(0.0,) * len(ids), stop="stop")
    ledger = _opened(template) + turn
    (drift,) = drifts(template, ledger, [TOOL])
    assert drift.cause is Cause.RETOKENISED and drift.harmless
    assert drift.at == len(template.open(TASK, [TOOL]))


def test_an_end_that_is_not_the_templates_own_is_told() -> None:
    template = template_for(FAMILIES["harmony"])
    ids = written(template, TASK, says("A gnu."), [TOOL])
    ledger = _opened(template) + Entry(Author.POLICY, ids, (says("A gnu."),), logprobs=(0.0,) * len(ids), stop="stop")
    assert drifts(template, ledger, [TOOL]) == ()
    (drift,) = drifts(template, _asked(template, ledger, _why(template)), [TOOL])
    assert drift.cause is Cause.END_TOKEN and drift.harmless


def test_each_turn_that_differs_is_told() -> None:
    template = template_for(HERMES)
    ledger = _opened(template)
    for _ in range(2):
        ledger += _wrote(template, "A gnu. <|im_end|>", says("A gnu."))
        ledger = _asked(template, ledger, _why(template))
    found = drifts(template, ledger, [TOOL])
    assert [drift.cause for drift in found] == [Cause.WHITESPACE] * 2
    assert found[0].at < found[1].at


def test_text_inserted_into_a_turn_belongs_to_it() -> None:
    template = template_for(HERMES)
    begun = template.tokens.encode("A gnu.")
    rest = template.tokens.encode(" A goat.<|im_end|>")
    whole = says("A gnu. Wait. A goat.")
    ledger = (
        _opened(template)
        + Entry(Author.POLICY, begun, logprobs=(0.0,) * len(begun), stop="stop")
        + Entry(Author.FEEDBACK, template.insert(" Wait."))
        + Entry(Author.POLICY, rest, (whole,), logprobs=(0.0,) * len(rest), stop="stop")
    )
    assert {drift.cause for drift in drifts(template, ledger, [TOOL])} <= {Cause.RETOKENISED}
    assert drifts(template, _asked(template, ledger, _why(template)), [TOOL]) == drifts(template, ledger, [TOOL])


def test_a_tail_that_the_template_would_write_otherwise_is_never_harmless() -> None:
    template = template_for(HERMES)
    ledger = _opened(template) + _wrote(template, "A gnu.<|im_end|>", says("A gnu."))
    for text, cause in (("Why not?", Cause.OTHER), ("Why ?", Cause.WHITESPACE)):
        wrong = Entry(Author.TOOL, template.tail(({"role": "user", "content": text},), ended=True), _why(template))
        (drift,) = drifts(template, ledger + wrong, [TOOL])
        assert drift.cause is cause and not drift.harmless


def test_a_conversation_that_the_template_refuses_is_told() -> None:
    template = template_for(FAMILIES["llama3"])
    ledger = _opened(template) + _wrote(template, "x<|eot_id|>", asks(calls("gnu", "emu")))
    (drift,) = drifts(template, ledger, [TOOL])
    assert drift.cause is Cause.OTHER and "one call per turn" in drift.expected


def test_arguments_that_are_no_json_are_compared_as_they_stand() -> None:
    class Loose:
        name = "loose"

        def parse(self, text: str) -> object:
            return type("R", (), {"content": "", "reasoning": "", "calls": calls("gnu")[:1]})

    template = template_for(HERMES, parser=Loose())
    ledger = _opened(template) + _wrote(template, "x<|im_end|>", asks(calls("gnu")))
    (drift,) = drifts(template, ledger, [TOOL])
    assert drift.cause is Cause.ARGUMENTS_REFORMATTED


def test_a_drift_shows_where_the_texts_part() -> None:
    drift = Drift(Cause.OTHER, "a" * 100 + "left", "a" * 100 + "right", 7)
    assert str(drift) == f"other at token 7: template {'a' * 20 + 'left'!r}, ledger {'a' * 20 + 'right'!r}"
    assert json.dumps(drift.cause) == '"other"'
