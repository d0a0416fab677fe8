"""Drift between a ledger and the full render: each difference with its cause and both texts."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.trainer.conversations import TASK, TOOL, calling_turn, make_calls, make_template, text_turn, tool_replies
from tests.trainer.tokenizer_families import FAMILIES
from trainer.ledger import Author, Entry, Ledger, Message
from trainer.template import Cause, Settings, Template, find_drifts
from trainer.template.template import Sanity

HERMES = FAMILIES["hermes"]


def _wrote(template: Template, text: str, turn: Message, stop: str = "stop") -> Entry:
    ids = template.tokenizer.encode(text)
    return Entry(Author.POLICY, ids, (turn,), logprobs=(0.0,) * len(ids), finish_reason=stop)


def _opened(template: Template) -> Ledger:
    return Ledger((Entry(Author.TASK, template.encode_prompt(TASK, [TOOL]), TASK),))


def _asked(template: Template, ledger: Ledger, after: Sequence[Message]) -> Ledger:
    ended = template.is_turn_ended(ledger.ids)
    return ledger + Entry(Author.TOOL, template.encode_tail(after, ended=ended), tuple(after))


def _why(template: Template) -> tuple[Message, ...]:
    return ({"role": "user", "content": "Why?"},)


def test_whitespace_is_drift_unless_ignored() -> None:
    template = make_template(HERMES)
    ledger = _opened(template) + _wrote(template, "A gnu.\n <|im_end|>", text_turn("A gnu."))
    (drift,) = find_drifts(template, ledger, [TOOL])
    assert drift.cause is Cause.WHITESPACE and not drift.is_harmless
    assert drift.token == len(template.encode_prompt(TASK, [TOOL]))
    ignoring = make_template(HERMES, Settings(sanity="ignore_strippable"))
    assert find_drifts(ignoring, ledger, [TOOL]) == ()


@pytest.mark.parametrize(("rest", "causes"), [("", []), (" \n", [Cause.WHITESPACE]), (" And more", [Cause.OTHER])])
def test_what_the_template_adds_to_an_unfinished_turn_is_drift_but_for_its_end(rest: str, causes: list[Cause]) -> None:
    template = make_template(HERMES)
    ledger = _opened(template) + _wrote(template, "A gnu", text_turn(f"A gnu{rest}"))
    assert [drift.cause for drift in find_drifts(template, ledger, [TOOL])] == causes


@pytest.mark.parametrize("sanity", ["strict", "ignore_strippable", "disable"])
def test_changed_words_are_drift_unless_the_check_is_disabled(sanity: Sanity) -> None:
    template = make_template(HERMES, Settings(sanity=sanity))
    ledger = _opened(template) + _wrote(template, "A gnu.<|im_end|>", text_turn("A goat."))
    found = find_drifts(template, ledger, [TOOL])
    assert [drift.cause for drift in found] == ([] if sanity == "disable" else [Cause.OTHER])
    if found:
        assert "goat" in str(found[0]) and "gnu" in str(found[0])


def test_reformatted_json_of_a_call_has_its_cause() -> None:
    template = make_template(HERMES)
    text = '<tool_call>\n{"name":"look_up","arguments":{"word":"gnu"}}\n</tool_call><|im_end|>'
    ledger = _opened(template) + _wrote(template, text, calling_turn(make_calls("gnu")))
    ledger = _asked(template, ledger, tool_replies(make_calls("gnu"), "found"))
    (drift,) = find_drifts(template, ledger, [TOOL])
    assert drift.cause is Cause.ARGUMENTS_REFORMATTED and drift.is_harmless


@pytest.mark.parametrize("name", ["qwen3", "qwq"])
def test_dropped_reasoning_has_its_cause(name: str) -> None:
    template = make_template(FAMILIES[name])
    turn = {**text_turn("A gnu."), "reasoning_content": "Hm."}
    text = "<think>\nHm.\n</think>\n\nA gnu.<|im_end|>".removeprefix(template.prefill)
    ledger = _asked(template, _opened(template) + _wrote(template, text, turn), _why(template))
    (drift,) = find_drifts(template, ledger, [TOOL])
    assert drift.cause is Cause.REASONING_STRIPPED and drift.is_harmless
    assert "Hm." in drift.got and "Hm." not in drift.expected


def test_same_text_in_other_tokens_is_retokenised() -> None:
    template = make_template(HERMES)
    letters = [id for letter in "arguments" for id in template.tokenizer.encode(letter)]
    ids = (*letters, template.stop_ids[0])
    assert template.tokenizer.encode("arguments") != tuple(letters)
    turn = Entry(Author.POLICY, ids, (text_turn("arguments"),), logprobs=(0.0,) * len(ids), finish_reason="stop")
    ledger = _opened(template) + turn
    (drift,) = find_drifts(template, ledger, [TOOL])
    assert drift.cause is Cause.RETOKENISED and drift.is_harmless
    assert drift.token == len(template.encode_prompt(TASK, [TOOL]))


def test_every_differing_turn_is_reported() -> None:
    template = make_template(HERMES)
    ledger = _opened(template)
    for _ in range(2):
        ledger += _wrote(template, "A gnu. <|im_end|>", text_turn("A gnu."))
        ledger = _asked(template, ledger, _why(template))
    found = find_drifts(template, ledger, [TOOL])
    assert [drift.cause for drift in found] == [Cause.WHITESPACE] * 2
    assert found[0].token < found[1].token
