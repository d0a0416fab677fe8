"""Whatever is said, what was appended piece by piece is what the template writes at one go."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gateway.types import ToolCall
from tests.trainer.conversations import TOOL, asks, replies, says, template_for
from tests.trainer.tokenizers_for_tests import FAMILIES, Family, tokenizer_for
from trainer.ledger import Author, Entry, Ledger, Message
from trainer.template import Cause, Template, drifts, written

CONTROL = sorted({token for family in FAMILIES.values() for token in (*family.special, *family.markup)})
LETTERS = st.characters(exclude_categories=["Cs"], exclude_characters="\ufdd0\ufdd1")
SAID = st.text(LETTERS, max_size=8).map(lambda text: f"a{text}b")
HOSTILE = st.lists(st.one_of(SAID, st.sampled_from(CONTROL), st.just("\n\n")), max_size=4).map("".join)
ARGUMENTS = st.dictionaries(st.sampled_from(["word", "n"]), st.one_of(SAID, st.integers(0, 9)), min_size=1)
ASKED = st.tuples(st.lists(st.tuples(ARGUMENTS, HOSTILE), min_size=1, max_size=3), st.just(""))
TOLD = st.tuples(st.just([]), st.tuples(SAID, HOSTILE))
TURNS = st.lists(st.one_of(ASKED, TOLD), min_size=1, max_size=4)
APPENDING = [family for family in FAMILIES.values() if not family.strips]


def _turn(family: Family, asked: list[Any], told: Any) -> tuple[Message, tuple[Message, ...]]:
    """What the policy says, and what it is answered."""
    if not asked:
        return says(told[0]), ({"role": "user", "content": told[1]},)
    some = asked if family.several else asked[:1]
    made = [ToolCall(f"call0000{i}", "look_up", json.dumps(arguments)) for i, (arguments, _) in enumerate(some)]
    return asks(made), replies(made, *(text for _, text in some))


def _rolled(family: Family, template: Template, task: tuple[Message, ...], turns: list[Any]) -> Ledger:
    ledger = Ledger((Entry(Author.TASK, template.open(task, [TOOL]), task),))
    for asked, told in turns:
        turn, after = _turn(family, asked, told)
        ids = written(template, ledger.messages, turn, [TOOL])
        ledger += Entry(Author.POLICY, ids, (turn,), logprobs=(0.0,) * len(ids), stop="stop")
        ledger += Entry(Author.TOOL, template.tail(after, ended=template.ended(ids)), after)
    return ledger


def _given(message: Message, objects: bool) -> dict[str, Any]:
    """The message as the template's own program wants its arguments."""
    rows = [
        {**call, "function": {**call["function"], "arguments": json.loads(call["function"]["arguments"])}}
        for call in message.get("tool_calls") or ()
    ]
    return {**message, "tool_calls": rows} if rows and objects else dict(message)


@pytest.mark.parametrize("family", APPENDING, ids=lambda family: family.name)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(system=SAID, user=HOSTILE, turns=TURNS)
def test_the_sum_of_the_tails_is_the_full_render(family: Family, system: str, user: str, turns: list[Any]) -> None:
    template = template_for(family)
    task: tuple[Message, ...] = ({"role": "system", "content": system}, {"role": "user", "content": user})
    ledger = _rolled(family, template, task, turns)
    tokenizer = tokenizer_for(family)
    rows = [_given(message, objects=family.name != "deepseek") for message in ledger.messages]
    full = tokenizer.apply_chat_template(rows, tools=[TOOL], tokenize=False, add_generation_prompt=True)
    # What harmony's policy ends by <|return|> stands in the history with <|end|>: the ledger keeps what was sampled.
    assert template.tokens.decode(ledger.ids).replace("<|return|>", "<|end|>") == full.replace("<|return|>", "<|end|>")
    causes = {drift.cause for drift in drifts(template, ledger, [TOOL])}
    assert causes <= {Cause.RETOKENISED, *([Cause.END_TOKEN] if family.name == "harmony" else [])}


@pytest.mark.parametrize("family", FAMILIES.values(), ids=lambda family: family.name)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(user=HOSTILE, turns=TURNS)
def test_control_tokens_stand_only_where_the_template_puts_them(family: Family, user: str, turns: list[Any]) -> None:
    template = template_for(family)
    tame = [([(arguments, "x") for arguments, _ in asked], told and (told[0], "x")) for asked, told in turns]
    control = set(template.tokens.control.values())
    put = []
    for said, plan in ((user, turns), ("x", tame)):
        ledger = _rolled(family, template, ({"role": "user", "content": said},), plan)
        entries = [entry for entry in ledger if entry.author is not Author.POLICY]
        put.append([id for entry in entries for id in entry.ids if id in control])
    assert put[0] == put[1]


@pytest.mark.parametrize("name", ["qwen3", "qwq"])
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(turns=TURNS)
def test_a_template_that_takes_reasoning_away_takes_nothing_else(name: str, turns: list[Any]) -> None:
    template = template_for(FAMILIES[name])
    ledger = _rolled(FAMILIES[name], template, ({"role": "user", "content": "x"},), turns)
    causes = {drift.cause for drift in drifts(template, ledger, [TOOL])}
    assert causes <= {Cause.RETOKENISED, Cause.REASONING_STRIPPED}


@settings(max_examples=100, deadline=None)
@given(text=st.one_of(HOSTILE, st.text()))
def test_text_comes_back_from_its_ids(text: str) -> None:
    tokens = template_for(FAMILIES["hermes"]).tokens
    kept = text.replace("\ufdd0", "").replace("\ufdd1", "")
    assert tokens.decode(tokens.encode(tokens.fenced(text))) == kept
    assert not set(tokens.encode(tokens.fenced(text))) & set(tokens.control.values())
