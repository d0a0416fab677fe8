"""Tests the examples of the note on multi-turn training: trajectory, environment, cache, reward and credit."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

from gateway.gateway import Gateway
from gateway.types import Outcome
from tests.seeds.conftest import Lay
from tests.seeds.seed_rollouts import LIMITS, WAIT_S, RolloutRunners, authors, load_tasks, make_template, score_group
from tests.trainer.policy_scripts import make_gateway, render_calls
from tests.trainer.reward.attempts import CharacterDecoder, call_turn, feedback_entry, make_rollout, tool_entry
from tests.trainer.sample_rollouts import policy
from trainer.engine.base import Sampling
from trainer.ledger import Author
from trainer.reward.attempt import Attempt
from trainer.rollout.rollout import Rollout, StopReason
from trainer.rollout.steppers import RolloutStart, Step, Turn
from trainer.rollout.task import Task


async def python(code: str) -> str:
    """A stand-in for a sandbox, which knows one program."""
    return {"import math\nprint(math.factorial(10))": "3628800"}[code]


PROGRAM = render_calls(("python", {"code": "import math\nprint(math.factorial(10))"}))
FACTORIAL = {"prompt": "Calculate the factorial of 10", "ground_truth": "3628800"}


async def _factorial() -> tuple[Task, Rollout]:
    (task,) = load_tasks(FACTORIAL)
    with anyio.fail_after(WAIT_S):
        async with make_gateway(python) as gateway:
            players = RolloutRunners(gateway, make_template(), LIMITS, None)
            return task, await players.play(task, PROGRAM, "#### 3,628,800")


async def test_trajectory_has_turns_calls_observations_and_final_reward(tmp_path: Path) -> None:
    task, played = await _factorial()
    assert authors(played) == ["task", "policy", "tool", "policy"]
    assert [message["role"] for message in played.ledger.messages] == ["user", "assistant", "tool", "assistant"]
    assert played.ledger.messages[2]["content"] == "3628800"
    (one,) = (await score_group({"components": {"right": {"function": "answer"}}}, [played], task, tmp_path)).scored
    assert (one.reward, one.turn_scores) == (1.0, (0.0, 0.0)), "the outcome belongs to the whole, and to no single turn"


def test_each_turn_may_have_its_own_reward() -> None:
    """The note's rewards: 0 for the question, 0.5 for the call, 0 for its result, 1 for the answer."""
    turns = make_rollout(
        call_turn("python"), tool_entry("3628800", reward=0.5), policy("It is 3,628,800."), feedback_entry("Yes.", 1.0)
    )
    attempt = Attempt(load_tasks(FACTORIAL)[0], turns, decoder=CharacterDecoder())
    assert attempt.given(Author.TOOL) == (0.5, 0.0) and attempt.given(Author.FEEDBACK) == (0.0, 1.0)
    assert attempt.trajectory["per_turn_rewards"] == [0.0, 0.5, 0.0, 1.0, 0.0]


async def test_trajectory_is_the_documented_dict() -> None:
    task, played = await _factorial()
    trajectory = Attempt(task, played, decoder=make_template()).trajectory
    roles = [turn["role"] for turn in trajectory["turns"]]
    assert roles == ["user", "assistant", "tool", "assistant"] and trajectory["per_turn_rewards"] == [0.0] * 4
    assert trajectory["turns"][0]["content"] == trajectory["prompt"] == FACTORIAL["prompt"]
    assert trajectory["turns"][1]["content"] == PROGRAM, "a call is text, as the policy wrote it"
    assert trajectory["turns"][2]["content"] == "3628800" and trajectory["response"].endswith("#### 3,628,800")
    assert trajectory["reward"] == 0.0


class ToolEnvironment:
    """An environment with tools: takes the policy's text, and returns an observation and whether it is done."""

    def __init__(self, tools: Mapping[str, Callable[..., Any]]) -> None:
        self.tools = tools
        self.steps = 0

    def step(self, action: str) -> tuple[str, bool]:
        self.steps += 1
        name, args = self._parsed(action)
        if name is None:
            return "", True
        if name not in self.tools:
            return f"Error: Unknown tool '{name}'", False
        try:
            return str(self.tools[name](**args)), False
        except Exception as error:  # boundary: what a tool raises is what the policy observes
            return f"Error: {error}", False

    def reset(self) -> None:
        self.steps = 0

    def _parsed(self, action: str) -> tuple[str | None, dict[str, Any]]:
        reply = make_template().parser.parse(action)
        return (reply.calls[0].name, json.loads(reply.calls[0].arguments)) if reply.calls else (None, {})


class Between:
    """A stepper that runs such an environment, one for each rollout."""

    def __init__(self, tools: Mapping[str, Callable[..., Any]]) -> None:
        self.tools = tools

    @asynccontextmanager
    async def begin(self, opening: RolloutStart) -> AsyncIterator[tuple[Step, Between]]:
        own = Between(self.tools)
        own.environment = ToolEnvironment(self.tools)
        own.environment.reset()
        yield Step(history=opening.task.messages), own

    environment: ToolEnvironment

    def check_finished(self, turn: Turn) -> bool:
        return False

    def step(self, turn: Turn) -> Step:
        observed, done = self.environment.step(make_template().decode_turn(turn.ledger.turns[-1].ids))
        if done:
            return Step(stop=StopReason.STEP_DONE, info={"steps": self.environment.steps})
        return Step(messages=({"role": "user", "content": observed},), info={"steps": self.environment.steps})


async def test_environment_with_step_and_reset_runs_between_turns() -> None:
    between = Between({"add": lambda a, b: a + b})
    said = [
        render_calls(("add", {"a": 1, "b": 2})),
        render_calls(("sub", {"a": 1})),
        render_calls(("add", {"a": 1})),
        "It is 3.",
    ]
    async with Gateway([]) as gateway:
        players = RolloutRunners(gateway, make_template(), LIMITS, between)
        first = await players.play(load_tasks({"prompt": "1 + 2?"})[0], *said)
        second = await players.play(load_tasks({"prompt": "1 + 2?"})[0], *said[-1:])
    observed = [
        str(entry.messages[0]["content"])
        for entry in first.ledger
        if entry.messages and entry.author is Author.FEEDBACK
    ]
    assert observed[:2] == ["3", "Error: Unknown tool 'sub'"] and observed[2].startswith("Error: ")
    assert first.stop is second.stop is StopReason.STEP_DONE
    assert (first.infos["steps"], second.infos["steps"]) == (4, 1), "each rollout has an environment of its own"


async def test_later_turn_computes_only_new_tokens() -> None:
    """Tests the cache of the embedded engine; for SGLang see tests/sglang."""
    from tests.trainer import tiny_models
    from trainer.engine.torch.torch_engine import TorchEngine

    history, result = tiny_models.random_prompt(200), tiny_models.random_prompt(9, seed=2)
    with anyio.fail_after(WAIT_S):
        async with TorchEngine(tiny_models.load_model()) as engine:
            first = await engine.generate(history, Sampling(max_tokens=8, seed=1))
            second = await engine.generate([*history, *first.ids, *result], Sampling(max_tokens=8, seed=1))
    assert first.cached_tokens == 0
    assert second.cached_tokens == len(history) + len(first.ids) - 1, (
        "all but the last token that was written, and the result"
    )


REWARDS = """
def verify_answer(response):
    return float("#### 7" in response)


def evaluate_tool_usage(turns):
    results = [turn["content"] for turn in turns if turn["role"] == "tool"]
    return float(bool(results) and "?" not in results)


def multiturn_reward(trajectory):
    turns = trajectory["turns"]
    n_turns = len([turn for turn in turns if turn["role"] == "assistant"])
    correctness = verify_answer(turns[-1]["content"])
    efficiency = max(0, 1.0 - 0.1 * n_turns)
    tool_quality = evaluate_tool_usage(turns)
    return 0.6 * correctness + 0.2 * efficiency + 0.2 * tool_quality
"""
WEIGHED = {
    "components": {
        "correctness": {"function": "answer", "weight": 0.6},
        "efficiency": {
            "function": "efficiency",
            "weight": 0.2,
            "args": {"per_call": 0.0, "per_turn": 0.1, "always": True},
        },
        "quality": {"function": "tool_quality", "weight": 0.2},
    },
    "success": "correctness",
}
SEVEN = load_tasks({"prompt": "What is 3 + 4?", "answer": "7"})[0]


def _attempts() -> list[Rollout]:
    """Rollouts: right with a tool, right by guessing, wrong with an invalid call, wrong by guessing."""
    made = [
        [call_turn("add"), tool_entry("7"), policy("#### 7")],
        [policy("#### 7")],
        [call_turn("add"), tool_entry("7"), call_turn("nope"), tool_entry("?", Outcome.INVALID), policy("#### 8")],
        [policy("#### 8")],
    ]
    return [make_rollout(*entries, index=index) for index, entries in enumerate(made)]


async def test_combined_reward_is_one_function_or_three_components(lay: Lay) -> None:
    folder = lay({"my_rewards.py": REWARDS})
    own = {"components": {"all": {"function": "my_rewards.py:multiturn_reward"}}, "success_at": 0.6}
    one = await score_group(own, _attempts(), SEVEN, folder)
    three = await score_group(WEIGHED, _attempts(), SEVEN, folder)
    found = [each.reward for each in one.scored]
    assert found == pytest.approx([0.6 + 0.2 * 0.8 + 0.2, 0.6 + 0.2 * 0.9, 0.2 * 0.7, 0.2 * 0.9])
    shift = {round(each.reward - other.reward, 9) for each, other in zip(one.scored, three.scored, strict=True)}
    assert shift == {0.2}, "a bonus that shrinks and a cost that grows differ by a constant, which no advantage sees"
    assert three.scored[0].components == pytest.approx({"correctness": 1.0, "efficiency": -0.2, "quality": 1.0})
