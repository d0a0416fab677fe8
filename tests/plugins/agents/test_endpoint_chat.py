"""Chats that agents send back: known turns keep their sampled ids, whatever the agent changed in their text."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mtrl_plugins.agents.agent_session import SampledTokens
from mtrl_plugins.agents.turn_tree import (
    Change,
    LedgerPrefixes,
    PolicyTurn,
    TurnTree,
    extend_key,
    message_key,
    tools_key,
)
from tests.plugins.agents.agent_harness import ADD, CALL, TEMPLATE, USER, open_agents, script, tool_reply
from tests.trainer.policy_scripts import make_gateway
from trainer.data.traces import RunTraces, TraceOptions
from trainer.engine.scripted import ScriptedEngine
from trainer.ledger import Author, Entry, Ledger
from trainer.rollout.loop import RolloutRunner
from trainer.rollout.rollout import Rollout, StopReason
from trainer.rollout.trace_player import play_trace
from trainer.storage.rollout_file import RolloutWriter


async def test_chat_goes_on_from_the_ids_that_were_sampled() -> None:
    async with open_agents([CALL, "It is 7."]) as harness, harness.session() as agent:
        message = await agent.chat([USER], tools=[ADD])
        assert message["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a":3,   "b": 4}'}
        last = await agent.chat([USER, message, tool_reply(message)], tools=[ADD])
        assert last["content"] == "It is 7."
        (ledger,) = agent.session.tree.ledgers()
        first, second = harness.engine.requests
        sampled = ledger.turns[0].ids
        assert second.ids[: len(first.ids) + len(sampled)] == first.ids + sampled
        assert [entry.author for entry in ledger] == [Author.TASK, Author.POLICY, Author.TOOL, Author.POLICY]
        assert agent.session.tree.changed == {}


async def test_rewritten_arguments_keep_the_sampled_ids_and_are_counted_once() -> None:
    async with open_agents([CALL, "first", "second"]) as harness, harness.session() as agent:
        message = await agent.chat([USER], tools=[ADD])
        message["tool_calls"][0]["function"]["arguments"] = '{"b":4,"a":3}'
        chat = [USER, message, tool_reply(message)]
        chat.append(await agent.chat(chat, tools=[ADD]))
        await agent.chat([*chat, {"role": "user", "content": "Sure?"}], tools=[ADD])
        (ledger,) = agent.session.tree.ledgers()
        assert '{"a":3,   "b": 4}' in TEMPLATE.tokenizer.decode(ledger.ids)
        assert agent.session.tree.changed == {Change.ARGUMENTS: 1}
        assert harness.engine.requests[-1].ids == ledger.ids[: ledger.starts[-1]]
        info, sampled = ledger.entries[1].info, agent.session.sampled
        assert (info["changed_by_agent"], info["sent_back"]["tool_calls"]) == (["arguments"], message["tool_calls"])
        assert (sampled.retokenised, sampled.discarded) == (0, 0)
        assert sampled.count == sum(len(turn.entry.ids) for turn in agent.session.tree.turns)


async def test_dropped_reasoning_other_spaces_and_other_call_ids_keep_the_sampled_ids() -> None:
    turns = [f"<think>Sum them.</think>I add. \n{CALL}", "It is 7."]
    async with open_agents(turns) as harness, harness.session() as agent:
        message = await agent.chat([USER], tools=[ADD])
        assert message["reasoning_content"] == "Sum them."
        del message["reasoning_content"]
        message["content"] = f"{message['content']}\n "
        message["tool_calls"][0]["id"] = "theirs"
        await agent.chat([USER, message, tool_reply(message)], tools=[ADD])
        (ledger,) = agent.session.tree.ledgers()
        assert len(ledger.turns) == 2 and "Sum them." in TEMPLATE.tokenizer.decode(ledger.ids)
        assert agent.session.tree.changed == {Change.REASONING: 1, Change.WHITESPACE: 1, Change.CALL_IDS: 1}
        assert ledger.entries[2].messages[0]["tool_call_id"] == ledger.turns[0].calls[0].id


async def test_text_that_is_no_call_comes_back_as_it_was_written() -> None:
    broken = '<tool_call>\n{"name": "add", "arguments": {"a": 3\n</tool_call>'
    async with open_agents([broken, "It is 7."]) as harness, harness.session() as agent:
        message = await agent.chat([USER], tools=[ADD])
        assert "tool_calls" not in message and message["content"] == broken
        await agent.chat([USER, message, USER], tools=[ADD])
        (ledger,) = agent.session.tree.ledgers()
        assert len(ledger.turns) == 2 and agent.session.tree.changed == {}


async def test_parallel_calls_are_answered_in_any_order() -> None:
    async with open_agents([f"{CALL}\n{CALL}", "It is 7."]) as harness, harness.session() as agent:
        message = await agent.chat([USER], tools=[ADD])
        replies = [tool_reply(message, "second", 1), tool_reply(message, "first", 0)]
        await agent.chat([USER, message, *replies], tools=[ADD])
        (ledger,) = agent.session.tree.ledgers()
        assert len({call.id for call in ledger.turns[0].calls}) == 2 and len(ledger.turns) == 2


async def test_answer_has_usage_logprobs_and_the_finish_reason() -> None:
    async with open_agents(["It is 7."]) as harness, harness.session() as agent:
        response = await agent.post("/chat/completions", {"messages": [USER], "logprobs": True})
        body = response.json()
        prompt = len(harness.engine.requests[0].ids)
        written = len(agent.session.tree.turns[0].entry.ids)
        assert body["usage"]["prompt_tokens"] == prompt and body["usage"]["completion_tokens"] == written
        assert body["choices"][0]["finish_reason"] == "stop"
        tokens = body["choices"][0]["logprobs"]["content"]
        assert len(tokens) == written and all(token["logprob"] == -0.5 for token in tokens)


async def test_turn_that_is_cut_at_max_tokens_goes_on_in_the_next_request() -> None:
    async with open_agents(["It is seven, I would say.", "So it is."]) as harness, harness.session() as agent:
        response = await agent.post("/chat/completions", {"messages": [USER], "max_completion_tokens": 3})
        choice = response.json()["choices"][0]
        assert choice["finish_reason"] == "length"
        await agent.chat([USER, choice["message"], {"role": "user", "content": "Go on"}])
        (ledger,) = agent.session.tree.ledgers()
        assert len(ledger.turns[0].ids) == 3
        assert harness.engine.requests[1].ids == ledger.ids[: ledger.starts[-1]]


async def test_several_system_messages_at_the_start_are_one() -> None:
    system = [{"role": "system", "content": "One."}, {"role": "developer", "content": "Two."}]
    async with open_agents(["yes"]) as harness, harness.session() as agent:
        await agent.chat([*system, USER])
        text = TEMPLATE.tokenizer.decode(harness.engine.requests[0].ids)
        assert text.count("system") == 1 and "One.\n\nTwo." in text


async def test_same_prompt_gets_the_same_seed_whatever_came_before() -> None:
    async def seeds(*questions: str) -> dict[str, int | None]:
        async with open_agents(lambda prompt: "yes") as harness, harness.session() as agent:
            for question in questions:
                await agent.chat([{"role": "user", "content": question}])
            return {
                question: request.sampling.seed
                for question, request in zip(questions, harness.engine.requests, strict=True)
            }

    assert await seeds("a", "b", "c") == await seeds("c", "b", "a")


async def test_tokens_of_a_prompt_are_counted_and_nothing_is_kept() -> None:
    async with open_agents(["It is 7."]) as harness, harness.session() as agent:
        tool = {"name": "add", "input_schema": ADD["function"]["parameters"]}
        body = {"system": "Be brief.", "messages": [USER], "tools": [tool]}
        counted = await agent.post("/messages/count_tokens", body)
        assert harness.engine.requests == [] and agent.session.tree.turns == []
        answer = (await agent.post("/messages", body | {"max_tokens": 50})).json()
        assert counted.json() == {"input_tokens": answer["usage"]["input_tokens"]}
        refused = await agent.post("/messages/count_tokens", {"messages": []})
        assert refused.status_code == 400 and refused.json()["type"] == "error"


async def test_turn_whose_ids_are_not_those_that_were_sampled_is_counted() -> None:
    """As if it had been encoded again on the way."""
    async with open_agents([CALL, "It is 7."]) as harness, harness.session() as agent:
        message = await agent.chat([USER], tools=[ADD])
        turn = agent.session.tree.turns[0]
        turn.entry = replace(turn.entry, ids=turn.entry.ids[::-1])
        agent.session._prefixes = LedgerPrefixes()  # It holds the ids that were sampled.
        await agent.chat([USER, message, tool_reply(message)], tools=[ADD])
        assert agent.session.sampled.retokenised == 1


def test_turn_that_cannot_be_recorded_is_discarded_and_unknown() -> None:
    sampled = SampledTokens()
    with pytest.raises(ValueError, match="mine"), sampled.recording((1,), (2, 3)):
        raise ValueError("mine")
    assert (sampled.count, sampled.discarded) == (2, 2)
    sampled.check_prompt((1, 2, 3))
    assert sampled.retokenised == 1


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
