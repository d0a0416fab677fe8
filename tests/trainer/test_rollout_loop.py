"""The rollout loop with real tools and a scripted policy: answers, limits, stop reasons, steppers and drift."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import anyio
import pytest

from gateway.config.models import Limits
from gateway.feedback.interaction_toolset import FeedbackToolset
from gateway.gateway import Gateway
from gateway.limits import LimitedToolset
from gateway.native.function import FunctionTool
from gateway.native.native_toolset import NativeToolset
from gateway.tool_table import Source
from gateway.types import Outcome, ToolResult
from gateway.types import Task as SessionTask
from tests.feedback.interactions import Recorder
from tests.trainer.conversations import make_template
from tests.trainer.policy_scripts import HERMES, QUESTION, encode_turns, make_gateway, render_calls
from tests.trainer.tokenizer_families import FAMILIES
from trainer.engine.scripted import Answer, ScriptedEngine
from trainer.ledger import OFFERED, Author
from trainer.rollout.loop import RolloutRunner
from trainer.rollout.rollout import Rollout, StopReason
from trainer.rollout.settings import RolloutLimits
from trainer.rollout.steppers import BackIntoThinking, Step, Stepper, ToolsAndFeedback, Turn
from trainer.rollout.task import Task
from trainer.template import Cause, Settings, Template, find_drifts


async def add(a: int, b: int) -> int:
    """Adds."""
    return a + b


async def finish() -> ToolResult:
    """Ends the rollout."""
    return ToolResult(done=True, reward=0.5)


async def hang() -> None:
    """Never answers."""
    await anyio.sleep_forever()


async def disconnect() -> None:
    """Raises a connection error."""
    raise ConnectionResetError("the line is dead")


async def answer_at_length() -> str:
    """Returns a long text."""
    return "word " * 5000


def gateway(**limits: Any) -> Gateway:
    return make_gateway(add, finish, hang, disconnect, answer_at_length, **limits)


PLAIN_TASK = Task("t", QUESTION)
FEEDBACK_TASK = Task(
    "t", QUESTION, session_task=SessionTask(id="t", feedback="gsm8k", feedback_args={"ground_truth": "7"})
)


async def run_rollout(
    answers: Sequence[Answer] | Callable[..., Answer],
    task: Task = PLAIN_TASK,
    *,
    template: Template | None = None,
    limits: RolloutLimits | None = None,
    stepper: Stepper | None = None,
    tools: Gateway | None = None,
) -> tuple[Rollout, ScriptedEngine]:
    texts = iter(answers) if not callable(answers) else None
    engine = ScriptedEngine((lambda ids, sampling, key: next(texts)) if texts is not None else answers)  # type: ignore[arg-type]
    with anyio.fail_after(60):
        async with tools or gateway() as open_gateway, engine:
            runner = RolloutRunner(
                engine,
                template or make_template(HERMES),
                open_gateway,
                limits or RolloutLimits(rollout_tokens=100_000),
                stepper=stepper or ToolsAndFeedback(),
            )
            return await runner.run(task, group="g"), engine


def authors(rollout: Rollout) -> list[str]:
    return [entry.author.value for entry in rollout.ledger]


async def test_tools_answer_calls_and_the_interaction_answers_text() -> None:
    template = make_template(HERMES)
    turns = encode_turns(template, render_calls(("add", {"a": 3, "b": 4})), "It is #### 8", "Then #### 7")
    rollout, engine = await run_rollout(turns, FEEDBACK_TASK, template=template)
    assert rollout.stop is StopReason.FEEDBACK_DONE
    assert authors(rollout) == ["task", "policy", "tool", "policy", "feedback", "policy", "feedback"]
    assert rollout.ledger.rewards == ((), (0.0,), (1.0,))
    assert rollout.rewards == {"feedback": 1.0}
    assert rollout.infos.get("drift") is None
    texts = [template.tokenizer.decode(entry.ids) for entry in rollout.ledger]
    assert "7" in texts[2] and "You need to reflect" in texts[4]
    assert [tuple(request.ids) for request in engine.requests] == [
        rollout.ledger.ids[: rollout.ledger.starts[index]] for index in (1, 3, 5)
    ], "each request starts with exactly the ids of the one before"


async def test_instructions_of_tools_are_the_system_prompt() -> None:
    tool = FunctionTool(add)
    tool.spec = replace(tool.spec, instructions="Adds without error.")
    tools = Gateway([Source("tools", LimitedToolset(NativeToolset([tool]), Limits()))])
    rollout, _ = await run_rollout(encode_turns(make_template(HERMES), "done"), tools=tools)
    assert rollout.ledger.messages[:2] == ({"role": "system", "content": "Adds without error."}, *QUESTION)


async def test_invalid_calls_are_answered_with_an_explanation() -> None:
    template = make_template(HERMES)
    turns = encode_turns(template, render_calls(("add", {"a": "three"})), render_calls(("nope", {})), "I give up")
    rollout, _ = await run_rollout(turns, template=template)
    tools = [entry for entry in rollout.ledger if entry.author is Author.TOOL]
    assert [entry.outcomes for entry in tools] == [(Outcome.INVALID,), (Outcome.INVALID,)]
    assert "is not of type" in str(tools[0].messages[0]["content"]) and "no tool named" in str(tools[1].messages)
    assert rollout.stop is StopReason.DONE and not rollout.stop.is_infrastructure


async def test_truncated_turn_ends_the_rollout_without_executing_calls() -> None:
    template = make_template(HERMES)
    endless = encode_turns(template, render_calls(("add", {"a": 1, "b": 1})) * 50, end=False)
    rollout, _ = await run_rollout(endless, template=template, limits=RolloutLimits(turn_tokens=40))
    assert rollout.stop is StopReason.LENGTH_TURN
    assert authors(rollout) == ["task", "policy"] and len(rollout.ledger.turns[0].ids) == 40


@pytest.mark.parametrize("limits", [{"rollout_tokens": 3000}, {"rollout_tokens": 100_000, "response_tokens": 200}])
async def test_too_long_answer_ends_the_rollout_and_adds_no_tokens(limits: dict[str, Any]) -> None:
    template = make_template(HERMES)
    turns = encode_turns(template, render_calls(("answer_at_length", {})))
    rollout, _ = await run_rollout(turns, template=template, limits=RolloutLimits(**limits))
    assert rollout.stop is StopReason.LENGTH_ROLLOUT and len(rollout.ledger.entries[0].ids) > 200
    assert rollout.ledger.entries[-1].ids == () and "does not fit" in rollout.reason


async def test_response_tokens_bound_turns_but_not_the_prompt() -> None:
    template = make_template(HERMES)
    endless = encode_turns(template, render_calls(("add", {"a": 1, "b": 1})) * 50, end=False)
    rollout, _ = await run_rollout(endless, template=template, limits=RolloutLimits(response_tokens=30))
    assert rollout.stop is StopReason.LENGTH_ROLLOUT and len(rollout.ledger.turns[0].ids) == 30


@pytest.mark.parametrize(
    ("limits", "stop", "turns"),
    [
        (RolloutLimits(assistant_turns=2), StopReason.ASSISTANT_TURNS, 2),
        (RolloutLimits(tool_calls=2), StopReason.TOOL_CALLS, 3),
        (RolloutLimits(timeout_s=1.0), StopReason.WALL_TIME, 1),
    ],
)
async def test_each_limit_has_its_own_stop_reason(limits: RolloutLimits, stop: StopReason, turns: int) -> None:
    template = make_template(HERMES)
    name = "hang" if stop is StopReason.WALL_TIME else "add"
    (turn,) = encode_turns(template, render_calls((name, {"a": 1, "b": 1} if name == "add" else {})))
    rollout, _ = await run_rollout(lambda ids, sampling, key: turn, template=template, limits=limits)
    assert rollout.stop is stop and len(rollout.ledger.turns) == turns


@pytest.mark.parametrize(
    ("name", "limits", "reason"),
    [("disconnect", {}, "the line is dead"), ("hang", {"timeout_s": 0.05}, "no answer within")],
)
async def test_failing_tool_ends_the_rollout_unscored(name: str, limits: Any, reason: str) -> None:
    template = make_template(HERMES)
    calls = render_calls(("finish", {}), (name, {}))  # the first gives a reward
    rollout, _ = await run_rollout(
        encode_turns(template, calls), FEEDBACK_TASK, template=template, tools=gateway(**limits)
    )
    assert rollout.stop is StopReason.TOOL_FAILED and rollout.stop.is_infrastructure
    assert reason in rollout.reason and rollout.rewards == {} and rollout.reward is None


async def test_failing_interaction_ends_the_rollout_unscored() -> None:
    template = make_template(HERMES)
    broken = FeedbackToolset({"gsm8k": Recorder({"turn": RuntimeError("its judge is down")})})
    rollout, _ = await run_rollout(
        encode_turns(template, "It is #### 8"), FEEDBACK_TASK, template=template, tools=Gateway([Source("it", broken)])
    )
    assert rollout.stop is StopReason.TOOL_FAILED
    assert "its judge is down" in rollout.reason and rollout.rewards == {} and rollout.reward is None


async def test_tool_can_end_the_rollout() -> None:
    template = make_template(HERMES)
    rollout, _ = await run_rollout(encode_turns(template, render_calls(("finish", {}))), template=template)
    assert rollout.stop is StopReason.TOOL_DONE and rollout.rewards == {"call": 0.5}


async def test_inserted_text_continues_the_turn_and_is_masked() -> None:
    template = make_template(HERMES)
    stepper = BackIntoThinking(lambda text, task: "7" in text, "\nWait, that is wrong. ")
    open_end = encode_turns(template, "It is 8", end=False)[0]
    rollout, _ = await run_rollout([open_end, *encode_turns(template, "7")], template=template, stepper=stepper)
    decoded = template.tokenizer.decode(rollout.ledger.ids)
    assert decoded.endswith("It is 8\nWait, that is wrong. 7<|im_end|>")
    inserted = rollout.ledger.entries[2]
    start = rollout.ledger.starts[2]
    assert not any(rollout.ledger.mask[start : start + len(inserted.ids)])


async def test_async_stepper_passes_infos_and_ends_the_rollout() -> None:
    class StopsAfterTwo:
        async def check_finished(self, turn: Turn) -> bool:
            return turn.number == 2

        async def step(self, turn: Turn) -> Step:
            return Step(messages=({"role": "user", "content": "more"},), info={"seen": turn.reply.content})

    rollout, _ = await run_rollout(encode_turns(make_template(HERMES), "one", "two"), stepper=StopsAfterTwo())
    assert rollout.stop is StopReason.STEP_DONE and rollout.infos["seen"] == "one"


async def test_seeds_differ_by_turn_and_are_reproducible() -> None:
    template = make_template(HERMES)
    turns = encode_turns(template, render_calls(("add", {"a": 1, "b": 1})), "2")
    seeds = []
    for _ in range(2):
        _, engine = await run_rollout(turns, template=template)
        seeds.append([request.sampling.seed for request in engine.requests])
    assert seeds[0] == seeds[1] and len(set(seeds[0])) == 2


async def test_inference_template_starts_a_new_ledger_when_reasoning_is_dropped() -> None:
    family = FAMILIES["qwen3"]
    texts = ("<think>\nhm\n</think>\n\n#### 1", "<think>\nso\n</think>\n\n#### 7")
    full = make_template(family)
    rollout, _ = await run_rollout(encode_turns(full, *texts), FEEDBACK_TASK, template=full)
    assert rollout.earlier == () and "hm" in full.tokenizer.decode(rollout.ledger.ids)
    restarting = make_template(family, Settings(history="inference_template"))
    task = replace(FEEDBACK_TASK, session_task=replace(FEEDBACK_TASK.session_task, tools=("add",)))
    rollout, engine = await run_rollout(encode_turns(restarting, *texts), task, template=restarting)
    assert [ledger.entries[0].info for ledger in rollout.ledgers] == [{OFFERED: ["add"]}] * 2
    assert len(rollout.earlier) == 1 and "hm" in restarting.tokenizer.decode(rollout.earlier[0].ids)
    assert "hm" not in restarting.tokenizer.decode(rollout.ledger.ids) and "so" in restarting.tokenizer.decode(
        rollout.ledger.ids
    )
    assert engine.requests[1].ids == rollout.ledger.entries[0].ids
    assert sum(rollout.ledger.mask) == len(rollout.ledger.turns[0].ids)


HERMES_TURN = render_calls(("add", {"a": 1, "b": 2}), ("add", {"a": 3, "b": 4}), ("add", {"a": 5, "b": 6}))
LLAMA_TURN = '{"name": "add", "parameters": {"a": 1, "b": 2}}; {"name": "add", "parameters": {"a": 3, "b": 4}}'
LEFT_OUT = "add was not called: a turn may have {} at most. Call it in your next turn."


async def test_further_calls_of_a_turn_are_answered_and_not_made_and_ids_stay_exact() -> None:
    template = make_template(HERMES, parser="hermes")
    turns = encode_turns(template, HERMES_TURN, "done")
    rollout, _ = await run_rollout(turns, template=template, limits=RolloutLimits(parallel_calls=2))
    policy, tool = rollout.ledger.entries[1:3]
    assert len(policy.messages[0]["tool_calls"]) == len({call.id for call in policy.calls}) == 2
    assert tool.outcomes == (Outcome.OK, Outcome.OK, Outcome.INVALID)
    assert [message["content"] for message in tool.messages] == ["3", "7", LEFT_OUT.format("2 calls")]
    assert [turn.ids for turn in rollout.turns] == turns and rollout.infos["drift"] == {Cause.EXTRA_CALLS: 1}
    drifts = find_drifts(template, rollout.ledger)
    assert all(drift.is_harmless for drift in drifts if drift.cause is Cause.EXTRA_CALLS)


async def test_template_that_writes_one_call_limits_a_turn_without_a_setting() -> None:
    template = make_template(FAMILIES["llama3"], parser="llama3")
    rollout, _ = await run_rollout(encode_turns(template, LLAMA_TURN, "done"), template=template)
    assert [message["content"] for message in rollout.ledger.entries[2].messages] == ["3", LEFT_OUT.format("1 call")]
    assert rollout.infos["drift"] == {Cause.EXTRA_CALLS: 1}
