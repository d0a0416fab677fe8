"""Tests rewards of whole rollouts: only the policy's own text counts as its answer."""

from __future__ import annotations

from dataclasses import replace

import anyio
import pytest

from gateway.types import Task as SessionTask
from gateway.types import Text, ToolResult
from tests.trainer.conversations import make_template
from tests.trainer.policy_scripts import HERMES, QUESTION, encode_turns, make_gateway, render_calls
from tests.trainer.reward.attempts import reward_settings
from trainer.engine.scripted import ScriptedEngine
from trainer.reward.scorer import ScoredRollout, Scorer
from trainer.rollout.loop import RolloutRunner
from trainer.rollout.rollout import StopReason
from trainer.rollout.settings import RolloutLimits
from trainer.rollout.steppers import BackIntoThinking, Stepper, ToolsAndFeedback
from trainer.rollout.task import Task

TASK = Task("t", QUESTION, truth="7")
FEEDBACK_TASK = replace(TASK, session_task=SessionTask("t", feedback="gsm8k", feedback_args={"ground_truth": "7"}))


async def add(a: int, b: int) -> ToolResult:
    """Adds, and formats the result like a final answer."""
    return ToolResult((Text(f"#### {a + b}"),), reward=0.5)


async def run_and_score(replies: list[tuple[int, ...]], task: Task, stepper: Stepper) -> ScoredRollout:
    turns = iter(replies)
    engine = ScriptedEngine(lambda ids, sampling, key: next(turns))
    components = {name: {"function": name} for name in ("answer", "outcome", "tools", "feedback")}
    limits = RolloutLimits(rollout_tokens=100_000)
    with anyio.fail_after(60):
        async with make_gateway(add) as gateway, engine:
            rollout = await RolloutRunner(engine, make_template(HERMES), gateway, limits, stepper=stepper).run(
                task, group="g"
            )
            (scored,) = (await Scorer(reward_settings(**components)).score(task, [rollout])).scored
            return scored


@pytest.mark.parametrize(("last", "reward"), [("Then #### 7", 1.0), ("It says that.", 0.0), ("", 0.0)])
async def test_tool_result_is_not_the_policys_answer(last: str, reward: float) -> None:
    turns = encode_turns(make_template(HERMES), render_calls(("add", {"a": 3, "b": 4})), last)
    scored = await run_and_score(turns, TASK, ToolsAndFeedback())
    assert scored.components == {"answer": reward, "outcome": reward, "tools": 0.5, "feedback": 0.0}
    assert scored.turn_scores == (0.5, 0.0) and scored.reward_from_turns == 0.5


async def test_feedback_scores_the_turn_before_it() -> None:
    scored = await run_and_score(
        encode_turns(make_template(HERMES), "#### 8", "#### 7"), FEEDBACK_TASK, ToolsAndFeedback()
    )
    assert scored.rollout.stop is StopReason.FEEDBACK_DONE
    assert scored.components == {"answer": 1.0, "outcome": 1.0, "tools": 0.0, "feedback": 1.0}
    assert scored.turn_scores == (0.0, 2.0)


@pytest.mark.parametrize("inserted", ["\nWait: #### 7 ", "\n<think>\nIt may be #### 7. "])
@pytest.mark.parametrize(
    ("last", "reward"), [("yes", 0.0), ("as I said", 0.0), ("so</think>#### 7", 1.0), ("so</think>#### 6", 0.0)]
)
async def test_text_inserted_by_a_plug_in_is_not_the_policys_answer(inserted: str, last: str, reward: float) -> None:
    turns = encode_turns(make_template(HERMES), "#### 8", last)
    scored = await run_and_score(turns, TASK, BackIntoThinking(lambda text, task: False, inserted))
    assert scored.components["answer"] == scored.components["outcome"] == reward
    assert len(scored.turn_scores) == 2
