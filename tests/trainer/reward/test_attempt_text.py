"""Tests of what reward functions read: the policy's text character for character, whatever was parsed from it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import anyio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.native.base import ToolResponse
from mtrl_plugins.verl.reward_function import score_arguments
from tests.trainer.conversations import make_template
from tests.trainer.policy_scripts import HERMES, encode_turns, make_gateway, make_tasks, render_calls
from tests.trainer.tokenizer_families import FAMILIES
from trainer.engine.scripted import ScriptedEngine
from trainer.ledger import Author, Entry, Ledger
from trainer.reward.attempt import Attempt, verbatim_messages
from trainer.rollout.loop import RolloutRunner
from trainer.rollout.rollout import Rollout, StopReason
from trainer.rollout.steppers import BackIntoThinking
from trainer.rollout.task import Task
from trainer.template import Template

TURNS = (
    "<think>\n I add. </think>\n\n  Let me see.\n" + render_calls(("add", {"a": 3, "b": 4})),
    "no thought </think>  \n#### 7 \n",
)
"""Turns whose text a parser changes: white space, a call, and a closing tag without an opening one."""


def add(a: int, b: int) -> tuple[ToolResponse, float]:
    """Adds."""
    return ToolResponse(text=str(a + b)), 0.0


def silent(a: int) -> str:
    """Gives no reward."""
    return str(a)


async def run_turns(*turns: str, stepper: Any = None, template: Template | None = None) -> Attempt:
    template = template or make_template(HERMES)
    answers = iter(encode_turns(template, *turns))
    more: Mapping[str, Any] = {"stepper": stepper} if stepper else {}
    with anyio.fail_after(60):
        async with make_gateway(add, silent) as gateway, ScriptedEngine(lambda *_: next(answers)) as engine:
            (task,) = make_tasks("one")
            rollout = await RolloutRunner(engine, template, gateway, **more).run(task, group="g")
    return Attempt(task, rollout, decoder=template)


async def test_text_has_no_text_that_a_plug_in_wrote_into_a_turn() -> None:
    attempt = await run_turns("#### 8", "#### 7", stepper=BackIntoThinking(lambda text, _: text.endswith("7")))
    assert attempt.texts == ("#### 8", "#### 7")
    assert attempt.verbatim_messages[-1]["content"] == "#### 8\n<think>\nWait, that is wrong. #### 7"


async def test_verl_functions_see_the_whole_response_with_calls_and_tool_text() -> None:
    attempt = await run_turns(*TURNS)
    solution = score_arguments(attempt)["solution_str"]
    assert solution.startswith(TURNS[0]) and solution.endswith(TURNS[1])
    assert solution.count("<tool_call>") == 1 and "<tool_response>\n7\n</tool_response>" in solution
    assert not any(token in solution for token in make_template(HERMES).tokenizer.special_tokens)
    ids, mask = attempt.response_ids
    own = [id for id, is_own in zip(ids, mask, strict=True) if is_own]
    assert own == [id for turn in attempt.turns for id in turn.ids]


async def test_tool_rewards_tell_a_reward_of_zero_from_none() -> None:
    calls = render_calls(("add", {"a": 3, "b": 4}), ("silent", {"a": 3}))
    attempt = await run_turns(calls, "done")
    assert attempt.tool_rewards == (0.0, None)
    scores = score_arguments(attempt)["extra_info"]["rollout_reward_scores"]
    assert scores == {"turn_scores": [], "tool_rewards": [0.0]}


async def test_turns_that_a_later_ledger_repeats_are_still_verbatim() -> None:
    template = make_template(FAMILIES["qwen3"])
    rollout = (await run_turns(*TURNS, template=template)).rollout
    prompt = Entry(Author.TASK, (1,), rollout.ledger.messages)
    repeated = Rollout("one", Ledger((prompt,)), StopReason.DONE, earlier=(rollout.ledger,))
    texts = [message["content"] for message in verbatim_messages(repeated, template) if message["role"] == "assistant"]
    assert texts == list(TURNS)


SNIPPETS = st.lists(
    st.sampled_from(["<think>", "</think>", "<tool_call>", "</tool_call>", '{"name": "add"}', "\n\n", " ", "#### 7"])
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=8),
    max_size=6,
).map("".join)


@pytest.mark.parametrize("name", ["hermes", "qwen3", "llama3", "mistral"])
@settings(max_examples=40, deadline=None)
@given(texts=st.lists(SNIPPETS, min_size=1, max_size=3), ended=st.booleans())
def test_texts_are_the_sampled_ids_character_for_character(name: str, texts: list[str], ended: bool) -> None:
    template = make_template(FAMILIES[name])
    decode, encode = template.tokenizer.decode, template.tokenizer.encode
    end = template.stop_ids[:1] if ended else ()
    turns = [encode(template.tokenizer.fence(text, markup=True)) + end for text in texts]
    entries = tuple(
        Entry(Author.POLICY, ids, ({"role": "assistant", "content": ""},), logprobs=(0.0,) * len(ids)) for ids in turns
    )
    rollout = Rollout("one", Ledger((Entry(Author.TASK, (1,)), *entries)), StopReason.DONE)
    attempt = Attempt(Task("one", ()), rollout, decoder=template)
    assert [text + decode(end) for text in attempt.texts] == [decode(ids) for ids in turns]
    for text in attempt.texts:
        assert decode(encode(template.tokenizer.fence(text, markup=True))) == text
