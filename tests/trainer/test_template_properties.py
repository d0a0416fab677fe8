"""Properties of incremental rendering for arbitrary conversations."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gateway.types import ToolCall
from tests.trainer.conversations import TOOL, calling_turn, make_template, text_turn, tool_replies
from tests.trainer.tokenizer_families import FAMILIES, Family, make_tokenizer
from trainer.ledger import Author, Entry, Ledger, Message
from trainer.template import Cause, Template, find_drifts, render_reply

CONTROL = sorted({token for family in FAMILIES.values() for token in (*family.special, *family.markup)})
LETTERS = st.characters(exclude_categories=["Cs"], exclude_characters="\ufdd0\ufdd1")
SAID = st.text(LETTERS, max_size=8).map(lambda text: f"a{text}b")
HOSTILE = st.lists(st.one_of(SAID, st.sampled_from(CONTROL), st.just("\n\n")), max_size=4).map("".join)
ARGUMENTS = st.dictionaries(st.sampled_from(["word", "n"]), st.one_of(SAID, st.integers(0, 9)), min_size=1)
ASKED = st.tuples(st.lists(st.tuples(ARGUMENTS, HOSTILE), min_size=1, max_size=3), st.just(""))
TOLD = st.tuples(st.just([]), st.tuples(SAID, HOSTILE))
TURNS = st.lists(st.one_of(ASKED, TOLD), min_size=1, max_size=4)
APPENDING = [family for family in FAMILIES.values() if not family.strips_reasoning]


def _turn(family: Family, asked: list[Any], told: Any) -> tuple[Message, tuple[Message, ...]]:
    """What the policy says, and what it is answered."""
    if not asked:
        return text_turn(told[0]), ({"role": "user", "content": told[1]},)
    some = asked if family.several_calls else asked[:1]
    made = [ToolCall(f"call0000{i}", "look_up", json.dumps(arguments)) for i, (arguments, _) in enumerate(some)]
    return calling_turn(made), tool_replies(made, *(text for _, text in some))


def _rolled(family: Family, template: Template, task: tuple[Message, ...], turns: list[Any]) -> Ledger:
    ledger = Ledger((Entry(Author.TASK, template.encode_prompt(task, [TOOL]), task),))
    for asked, told in turns:
        turn, after = _turn(family, asked, told)
        ids = render_reply(template, ledger.messages, turn, [TOOL])
        ledger += Entry(Author.POLICY, ids, (turn,), logprobs=(0.0,) * len(ids), finish_reason="stop")
        ledger += Entry(Author.TOOL, template.encode_tail(after, ended=template.is_turn_ended(ids)), after)
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
def test_tails_add_up_to_the_full_render(family: Family, system: str, user: str, turns: list[Any]) -> None:
    template = make_template(family)
    task: tuple[Message, ...] = ({"role": "system", "content": system}, {"role": "user", "content": user})
    ledger = _rolled(family, template, task, turns)
    tokenizer = make_tokenizer(family)
    rows = [_given(message, objects=family.name != "deepseek") for message in ledger.messages]
    full = tokenizer.apply_chat_template(rows, tools=[TOOL], tokenize=False, add_generation_prompt=True)
    # What harmony's policy ends by <|return|> stands in the history with <|end|>: the ledger keeps what was sampled.
    assert template.tokenizer.decode(ledger.ids).replace("<|return|>", "<|end|>") == full.replace(
        "<|return|>", "<|end|>"
    )
    causes = {drift.cause for drift in find_drifts(template, ledger, [TOOL])}
    assert causes <= {Cause.RETOKENISED, *([Cause.END_TOKEN] if family.name == "harmony" else [])}


@pytest.mark.parametrize("family", FAMILIES.values(), ids=lambda family: family.name)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(user=HOSTILE, turns=TURNS)
def test_control_tokens_come_from_the_template_only(family: Family, user: str, turns: list[Any]) -> None:
    template = make_template(family)
    tame = [([(arguments, "x") for arguments, _ in asked], told and (told[0], "x")) for asked, told in turns]
    control = set(template.tokenizer.control_ids.values())
    put = []
    for said, plan in ((user, turns), ("x", tame)):
        ledger = _rolled(family, template, ({"role": "user", "content": said},), plan)
        entries = [entry for entry in ledger if entry.author is not Author.POLICY]
        put.append([id for entry in entries for id in entry.ids if id in control])
    assert put[0] == put[1]


@pytest.mark.parametrize("name", ["qwen3", "qwq"])
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(turns=TURNS)
def test_template_drops_nothing_but_reasoning(name: str, turns: list[Any]) -> None:
    template = make_template(FAMILIES[name])
    ledger = _rolled(FAMILIES[name], template, ({"role": "user", "content": "x"},), turns)
    causes = {drift.cause for drift in find_drifts(template, ledger, [TOOL])}
    assert causes <= {Cause.RETOKENISED, Cause.REASONING_STRIPPED}


@settings(max_examples=100, deadline=None)
@given(text=st.one_of(HOSTILE, st.text()))
def test_text_round_trips_through_ids(text: str) -> None:
    tokens = make_template(FAMILIES["hermes"]).tokenizer
    kept = text.replace("\ufdd0", "").replace("\ufdd1", "")
    assert tokens.decode(tokens.encode(tokens.fence(text))) == kept
    assert not set(tokens.encode(tokens.fence(text))) & set(tokens.control_ids.values())
