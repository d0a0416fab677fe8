"""Branches of a rollout: side calls, retries, edited histories and other tools; each sampled token is trained once."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mtrl_plugins.agents.turn_tree import Change, PolicyTurn, TurnTree, extend_key, message_key, tools_key
from tests.plugins.agents.agent_harness import ADD, CALL, TEMPLATE, USER, open_agents, script, tool_reply
from tests.trainer.policy_scripts import make_gateway
from trainer.data.traces import RunTraces, TraceOptions
from trainer.engine.scripted import ScriptedEngine
from trainer.ledger import Author, Entry, Ledger
from trainer.rollout.loop import RolloutRunner
from trainer.rollout.rollout import Rollout, StopReason
from trainer.rollout.trace_player import play_trace
from trainer.storage.rollout_file import RolloutWriter

pytestmark = pytest.mark.anyio


def trained(ledgers: list[Ledger]) -> int:
    return sum(sum(ledger.mask) for ledger in ledgers)


async def test_retry_is_a_branch_whose_shared_beginning_is_trained_once() -> None:
    async with open_agents([CALL, "It is 7.", "Seven."]) as harness, harness.session() as agent:
        message = await agent.chat([USER], tools=[ADD])
        chat = [USER, message, tool_reply(message)]
        await agent.chat(chat, tools=[ADD])
        await agent.chat(chat, tools=[ADD])
        first, second = agent.session.tree.ledgers()
        assert harness.engine.requests[1].ids == harness.engine.requests[2].ids
        assert harness.engine.requests[1].sampling.seed != harness.engine.requests[2].sampling.seed
        assert [entry.author for entry in second] == [Author.TASK, Author.TASK, Author.TOOL, Author.POLICY]
        assert first.entries[1].ids == second.entries[1].ids
        assert trained([first, second]) == sum(len(turn.entry.ids) for turn in agent.session.tree.turns)


async def test_chats_are_traces_with_the_tools_that_each_was_sent_with(tmp_path: Path) -> None:
    async with open_agents([CALL, "A title", "It is 7.", "Seven."]) as harness, harness.session() as agent:
        message = await agent.chat([USER], tools=[ADD])
        await agent.chat([{"role": "user", "content": "Make a title."}])
        for _ in range(2):
            await agent.chat([USER, message, tool_reply(message)], tools=[ADD])
        *earlier, ledger = agent.session.tree.ledgers()
        assert [len(each.turns) for each in (*earlier, ledger)] == [1, 2, 1] and agent.session.tree.changed == {}
    rollout = Rollout("t", ledger, StopReason.DONE, earlier=tuple(earlier))
    with RolloutWriter(tmp_path) as writer:
        writer.add(rollout)
    async with make_gateway() as gateway:
        runner = RolloutRunner(ScriptedEngine(script(())), TEMPLATE, gateway)
        played = [await play_trace(runner, trace) for trace in cast(Any, RunTraces(tmp_path, TraceOptions()))]
    assert [each.ledger.ids for each in played] == [each.ids for each in rollout.ledgers]


async def test_edited_history_is_a_new_prompt_and_is_counted() -> None:
    async with open_agents(["It is 8.", "Sorry."]) as harness, harness.session() as agent:
        message = await agent.chat([USER])
        await agent.chat([USER, {**message, "content": "It is 9."}, {"role": "user", "content": "Wrong."}])
        first, second = agent.session.tree.ledgers()
        assert agent.session.tree.changed == {Change.HISTORY: 1}
        assert trained([first, second]) == sum(len(turn.entry.ids) for turn in agent.session.tree.turns)
        assert "It is 9." in TEMPLATE.tokenizer.decode(second.ids)


async def test_other_tools_in_mid_rollout_are_a_new_prompt_and_are_counted() -> None:
    other = {**ADD, "function": {**ADD["function"], "name": "sum"}}  # type: ignore[dict-item]
    async with open_agents([CALL, "It is 7."]) as harness, harness.session() as agent:
        message = await agent.chat([USER], tools=[ADD])
        await agent.chat([USER, message, tool_reply(message)], tools=[ADD, other])
        assert len(agent.session.tree.ledgers()) == 2
        assert agent.session.tree.changed == {Change.TOOLS: 1}


CHATS = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 2)), min_size=1, max_size=14)


@given(CHATS)
@settings(max_examples=200, deadline=None)
def test_every_turn_is_the_policys_in_exactly_one_ledger(steps: list[tuple[int, int]]) -> None:
    """However chats fork, restart and repeat."""
    tree, tools = TurnTree(), tools_key(())
    chats: list[list[dict[str, Any]]] = [[{"role": "user", "content": "start"}]]
    for number, (place, word) in enumerate(steps):
        chat = chats[place % len(chats)]
        found = tree.find(chat, tools)
        prompt = Entry(Author.TASK, (number,), tuple(found.rest))
        message = {"role": "assistant", "content": f"word {word}"}
        entry = Entry(Author.POLICY, (100 + number,), (message,), logprobs=(0.0,), version=0)
        tree.add(PolicyTurn(found.parent, prompt, entry, message, tools, ended=True), found)
        chats.append([*chat, message, {"role": "user", "content": "next"}])
    ledgers = tree.ledgers()
    sampled = sorted(id for ledger in ledgers for turn in ledger.turns for id in turn.ids)
    assert sampled == [100 + number for number in range(len(steps))]
    leaves = {ledger.ids for ledger in ledgers}
    assert len(leaves) == len(ledgers)


def test_meaning_of_a_message_ignores_ids_and_json_spacing_but_nothing_else() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1,"b":2}'}}
    other = {"id": "2", "type": "function", "function": {"name": "add", "arguments": '{"b": 2, "a": 1}'}}
    changed = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 2,"b":2}'}}

    def key(*calls: Any) -> bytes:
        return message_key({"role": "assistant", "content": "", "tool_calls": list(calls)})

    assert key(call) == key(other) != key(changed)
    assert key(call, changed) != key(changed, call)
    assert extend_key(key(call), key(changed)) != extend_key(key(changed), key(call))
    assert message_key({"role": "user", "content": "a"}) != message_key({"role": "assistant", "content": "a"})
