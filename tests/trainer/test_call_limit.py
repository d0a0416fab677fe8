"""A turn makes as many calls as the settings and the template allow; the rest are answered with an error."""

from __future__ import annotations

from typing import Any

import anyio

from gateway.types import Outcome
from tests.trainer.conversations import make_template
from tests.trainer.policy_scripts import encode_turns, make_gateway, make_tasks, render_calls, script_by_task
from tests.trainer.tokenizer_families import FAMILIES
from trainer.engine.scripted import ScriptedEngine
from trainer.ledger import Author
from trainer.rollout.loop import RolloutRunner
from trainer.rollout.rollout import Rollout, StopReason
from trainer.rollout.settings import RolloutLimits
from trainer.template import Cause, Template, find_drifts

HERMES_TURN = render_calls(("add", {"a": 1, "b": 2}), ("add", {"a": 3, "b": 4}), ("add", {"a": 5, "b": 6}))
LLAMA_TURN = '{"name": "add", "parameters": {"a": 1, "b": 2}}; {"name": "add", "parameters": {"a": 3, "b": 4}}'
LEFT_OUT = "add was not called: a turn may have {} at most. Call it in your next turn."


async def _roll(template: Template, turn: str, calls: list[int], **limits: Any) -> Rollout:
    def add(a: int, b: int) -> int:
        """Adds."""
        calls.append(a + b)
        return a + b

    engine = ScriptedEngine(script_by_task({"t": (turn, "done")}, template))
    with anyio.fail_after(60):
        async with make_gateway(add) as gateway:
            runner = RolloutRunner(engine, template, gateway, RolloutLimits(**limits))
            return await runner.run(*make_tasks("t"))


async def test_further_calls_of_a_turn_are_answered_and_not_made_and_ids_stay_exact() -> None:
    calls: list[int] = []
    template = make_template(FAMILIES["hermes"], parser="hermes")
    rollout = await _roll(template, HERMES_TURN, calls, parallel_calls=2)
    assert sorted(calls) == [3, 7] and rollout.stop is StopReason.DONE
    policy, tool = rollout.ledger.entries[1:3]
    assert len(policy.messages[0]["tool_calls"]) == len({call.id for call in policy.calls}) == 2
    assert tool.outcomes == (Outcome.OK, Outcome.OK, Outcome.INVALID)
    assert [message["content"] for message in tool.messages] == ["3", "7", LEFT_OUT.format("2 calls")]
    written = [entry.ids for entry in rollout.ledger if entry.author is Author.POLICY]
    assert written == encode_turns(template, HERMES_TURN, "done")
    assert rollout.infos["drift"] == {Cause.EXTRA_CALLS: 1}
    drifts = find_drifts(template, rollout.ledger)
    assert all(drift.is_harmless for drift in drifts if drift.cause is Cause.EXTRA_CALLS)


async def test_template_that_writes_one_call_limits_a_turn_without_a_setting() -> None:
    calls: list[int] = []
    template = make_template(FAMILIES["llama3"], parser="llama3")
    rollout = await _roll(template, LLAMA_TURN, calls)
    assert calls == [3] and rollout.stop is StopReason.DONE
    assert [message["content"] for message in rollout.ledger.entries[2].messages] == ["3", LEFT_OUT.format("1 call")]
    assert rollout.infos["drift"] == {Cause.EXTRA_CALLS: 1}
