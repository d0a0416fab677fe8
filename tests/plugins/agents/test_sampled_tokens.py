"""Counts of what an agent's engine sampled, and the comparison of prompts with what was sampled before."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mtrl_plugins.agents.agent_session import SampledTokens
from mtrl_plugins.agents.turn_tree import LedgerPrefixes
from tests.plugins.agents.agent_harness import open_agents
from tests.plugins.agents.chats import ADD, CALL, USER, tool_reply

pytestmark = pytest.mark.anyio


async def test_prompts_that_go_on_from_sampled_ids_are_not_retokenised() -> None:
    async with open_agents([CALL, "It is 7."]) as harness, harness.session() as agent:
        message = await agent.chat([USER], tools=[ADD])
        message["tool_calls"][0]["function"]["arguments"] = '{\n "b": 4, "a": 3}'
        await agent.chat([USER, message, tool_reply(message)], tools=[ADD])
        sampled = agent.session.sampled
        assert (sampled.retokenised, sampled.discarded) == (0, 0)
        assert sampled.count == sum(len(turn.entry.ids) for turn in agent.session.tree.turns)
        entry = agent.session.tree.ledgers()[-1].entries[1]
        assert entry.info["changed_by_agent"] == ["arguments"]
        assert entry.info["sent_back"]["tool_calls"] == message["tool_calls"]


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
