"""From a policy that is played to its reward: whatever else is in its turn, only its own words are its answer."""

from __future__ import annotations

from dataclasses import replace

import anyio
import pytest

from gateway.types import Task as Asked
from gateway.types import Text, ToolResult
from tests.trainer.conversations import template_for
from tests.trainer.reward.attempts import settings
from tests.trainer.scripts import ASKS, HERMES, calling, gateway_of, says
from trainer.config import RolloutLimits
from trainer.engine.scripted import ScriptedEngine
from trainer.play import Player
from trainer.reward.scored import Scored
from trainer.reward.scorer import Scorer
from trainer.run.rollout import StopReason
from trainer.steps import BackIntoThinking, Stepper, ToolsAndFeedback
from trainer.task import Task

TASK = Task("t", ASKS, truth="7")
HEARD = replace(TASK, asked=Asked("t", feedback="gsm8k", feedback_args={"ground_truth": "7"}))


async def add(a: int, b: int) -> ToolResult:
    """Adds, and says so as if it were an answer."""
    return ToolResult((Text(f"#### {a + b}"),), reward=0.5)


async def played(said: list[tuple[int, ...]], task: Task, stepper: Stepper) -> Scored:
    turns = iter(said)
    engine = ScriptedEngine(lambda ids, sampling, key: next(turns))
    components = {name: {"function": name} for name in ("answer", "outcome", "tools", "feedback")}
    limits = RolloutLimits(rollout_tokens=100_000)
    with anyio.fail_after(20):
        async with gateway_of(add) as gateway, engine:
            rollout = await Player(engine, template_for(HERMES), gateway, limits, stepper=stepper).play(task, group="g")
            (one,) = (await Scorer(settings(**components)).score(task, [rollout])).scored
            return one


@pytest.mark.parametrize(("last", "worth"), [("Then #### 7", 1.0), ("It says that.", 0.0), ("", 0.0)])
async def test_what_a_tool_says_is_not_the_answer_of_whoever_called_it(last: str, worth: float) -> None:
    turns = says(template_for(HERMES), calling(("add", {"a": 3, "b": 4})), last)
    one = await played(turns, TASK, ToolsAndFeedback())
    assert one.components == {"answer": worth, "outcome": worth, "tools": 0.5, "feedback": 0.0}
    assert one.turns == (0.5, 0.0) and one.spread == 0.5


async def test_a_judge_scores_the_turn_that_it_answers() -> None:
    one = await played(says(template_for(HERMES), "#### 8", "#### 7"), HEARD, ToolsAndFeedback())
    assert one.rollout.stop is StopReason.FEEDBACK_DONE
    assert one.components == {"answer": 1.0, "outcome": 1.0, "tools": 0.0, "feedback": 1.0}
    assert one.turns == (0.0, 2.0)


@pytest.mark.parametrize("inserted", ["\nWait: #### 7 ", "\n<think>\nIt may be #### 7. "])
@pytest.mark.parametrize(
    ("last", "worth"), [("yes", 0.0), ("as I said", 0.0), ("so</think>#### 7", 1.0), ("so</think>#### 6", 0.0)]
)
async def test_what_a_plug_in_writes_into_a_turn_is_not_the_policy_s_answer(
    inserted: str, last: str, worth: float
) -> None:
    turns = says(template_for(HERMES), "#### 8", last)
    one = await played(turns, TASK, BackIntoThinking(lambda text, task: False, inserted))
    assert one.components["answer"] == one.components["outcome"] == worth
    assert len(one.turns) == 2
