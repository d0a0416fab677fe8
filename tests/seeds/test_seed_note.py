"""The note on training over several turns: trajectory, environment, cache, reward and credit as it sketches them."""

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
from tests.seeds.rolled import LIMITS, WAIT_S, Players, authors, scored, tasks, template
from tests.trainer.reward.attempts import answered, calls, heard, rollout
from tests.trainer.scripts import calling, gateway_of
from tests.trainer.told import policy
from trainer.engine.base import Sampling
from trainer.ledger import Author
from trainer.reward.attempt import Attempt
from trainer.reward.scored import Scored, ScoredGroup
from trainer.run.rollout import Rollout, StopReason
from trainer.steps import Opening, Step, Turn
from trainer.task import Task


async def python(code: str) -> str:
    """Stands for a sandbox: it knows one program."""
    return {"import math\nprint(math.factorial(10))": "3628800"}[code]


PROGRAM = calling(("python", {"code": "import math\nprint(math.factorial(10))"}))
FACTORIAL = {"prompt": "Calculate the factorial of 10", "ground_truth": "3628800"}


async def _factorial() -> tuple[Task, Rollout]:
    (task,) = tasks(FACTORIAL)
    with anyio.fail_after(WAIT_S):
        async with gateway_of(python) as gateway:
            players = Players(gateway, template(), LIMITS, None)
            return task, await players.play(task, PROGRAM, "#### 3,628,800")


async def test_a_trajectory_is_turn_call_observation_turn_and_its_reward_comes_last(tmp_path: Path) -> None:
    task, played = await _factorial()
    assert authors(played) == ["task", "policy", "tool", "policy"]
    assert [message["role"] for message in played.ledger.messages] == ["user", "assistant", "tool", "assistant"]
    assert played.ledger.messages[2]["content"] == "3628800"
    (one,) = (await scored({"components": {"right": {"function": "answer"}}}, [played], task, tmp_path)).scored
    assert (one.reward, one.turns) == (1.0, (0.0, 0.0)), "the outcome belongs to the whole, and to no single turn"


async def test_a_single_turn_has_a_prompt_a_response_and_a_reward(tmp_path: Path) -> None:
    (task,) = tasks({"prompt": "What is 2+3?", "answer": "5"})
    async with gateway_of() as gateway:
        played = await Players(gateway, template(), LIMITS, None).play(task, "The answer is 5.")
    settings = {"components": {"right": {"function": "answer", "args": {"method": "flexible"}}}}
    assert (await scored(settings, [played], task, tmp_path)).scored[0].reward == 1.0


def test_each_turn_may_have_a_reward_of_its_own() -> None:
    """The note's numbers: nothing for the question, a half for the call, nothing for its result, one for the answer."""
    turns = rollout(calls("python"), answered("3628800", reward=0.5), policy("It is 3,628,800."), heard("Yes.", 1.0))
    attempt = Attempt(tasks(FACTORIAL)[0], turns)
    assert attempt.given(Author.TOOL) == (0.5, 0.0) and attempt.given(Author.FEEDBACK) == (0.0, 1.0)


class ToolEnvironment:
    """Knows tools by name; is told what the policy wrote, and tells what is observed, and whether that is all."""

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
        reply = template().parser.parse(action)
        return (reply.calls[0].name, json.loads(reply.calls[0].arguments)) if reply.calls else (None, {})


class Between:
    """The plug-in that puts such an environment between two turns: one for each rollout, reset before the first."""

    def __init__(self, tools: Mapping[str, Callable[..., Any]]) -> None:
        self.tools = tools

    @asynccontextmanager
    async def begin(self, opening: Opening) -> AsyncIterator[tuple[Step, Between]]:
        own = Between(self.tools)
        own.environment = ToolEnvironment(self.tools)
        own.environment.reset()
        yield Step(history=opening.task.messages), own

    environment: ToolEnvironment

    def check_finished(self, turn: Turn) -> bool:
        return False

    def step(self, turn: Turn) -> Step:
        observed, done = self.environment.step(template().words(turn.ledger.turns[-1].ids))
        if done:
            return Step(stop=StopReason.STEP_DONE, info={"steps": self.environment.steps})
        return Step(messages=({"role": "user", "content": observed},), info={"steps": self.environment.steps})


async def test_an_environment_with_step_and_reset_stands_between_turns() -> None:
    between = Between({"add": lambda a, b: a + b})
    said = [calling(("add", {"a": 1, "b": 2})), calling(("sub", {"a": 1})), calling(("add", {"a": 1})), "It is 3."]
    async with Gateway([]) as gateway:
        players = Players(gateway, template(), LIMITS, between)
        first = await players.play(tasks({"prompt": "1 + 2?"})[0], *said)
        second = await players.play(tasks({"prompt": "1 + 2?"})[0], *said[-1:])
    observed = [
        str(entry.messages[0]["content"])
        for entry in first.ledger
        if entry.messages and entry.author is Author.FEEDBACK
    ]
    assert observed[:2] == ["3", "Error: Unknown tool 'sub'"] and observed[2].startswith("Error: ")
    assert first.stop is second.stop is StopReason.STEP_DONE
    assert (first.infos["steps"], second.infos["steps"]) == (4, 1), "each rollout has an environment of its own"


async def test_a_later_turn_reads_only_what_is_new() -> None:
    """The embedded engine's cache; with SGLang it is the server's (tests/sglang)."""
    from tests.trainer import tiny
    from trainer.engine.torch import TorchEngine

    history, result = tiny.prompt(200), tiny.prompt(9, seed=2)
    with anyio.fail_after(WAIT_S):
        async with TorchEngine(tiny.model()) as engine:
            first = await engine.generate(history, Sampling(max_tokens=8, seed=1))
            second = await engine.generate([*history, *first.ids, *result], Sampling(max_tokens=8, seed=1))
    assert first.cached == 0
    assert second.cached == len(history) + len(first.ids) - 1, "all but the last token that was written, and the result"


REWARDS = """
from trainer.ledger import Author
from trainer.reward.shipped import answer, tool_quality


def multiturn_reward(attempt):
    turns = attempt.messages
    n_turns = len([turn for turn in turns if turn["role"] == "assistant"])
    correctness = answer(attempt)
    efficiency = max(0, 1.0 - 0.1 * n_turns)
    return 0.6 * correctness + 0.2 * efficiency + 0.2 * tool_quality(attempt)
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
SEVEN = tasks({"prompt": "What is 3 + 4?", "answer": "7"})[0]


def _attempts() -> list[Rollout]:
    """Right with a tool; right by guessing; wrong, with one call that no tool could take; wrong by guessing."""
    made = [
        [calls("add"), answered("7"), policy("#### 7")],
        [policy("#### 7")],
        [calls("add"), answered("7"), calls("nope"), answered("?", Outcome.INVALID), policy("#### 8")],
        [policy("#### 8")],
    ]
    return [rollout(*entries, index=index) for index, entries in enumerate(made)]


async def test_a_reward_of_outcome_efficiency_and_tool_quality_is_one_function_or_three_weights(lay: Lay) -> None:
    folder = lay({"my_rewards.py": REWARDS})
    own = {"components": {"all": {"function": "my_rewards.py:multiturn_reward"}}, "success_at": 0.6}
    one = await scored(own, _attempts(), SEVEN, folder)
    three = await scored(WEIGHED, _attempts(), SEVEN, folder)
    found = [each.reward for each in one.scored]
    assert found == pytest.approx([0.6 + 0.2 * 0.8 + 0.2, 0.6 + 0.2 * 0.9, 0.2 * 0.7, 0.2 * 0.9])
    shift = {round(each.reward - other.reward, 9) for each, other in zip(one.scored, three.scored, strict=True)}
    assert shift == {0.2}, "a bonus that shrinks and a cost that grows differ by a constant, which no advantage sees"
    assert three.scored[0].components == pytest.approx({"correctness": 1.0, "efficiency": -0.2, "quality": 1.0})


async def test_efficiency_that_is_paid_for_success_alone_does_not_teach_to_guess(lay: Lay) -> None:
    """The note's advice: a bonus for brevity must not pay for guessing without a tool."""
    folder = lay({})
    always = {**WEIGHED["components"]["efficiency"], "weight": 1.0}  # type: ignore[index]
    wrong_long, wrong_short = _attempts()[2:]
    greedy = await scored({"components": {"e": always}}, [wrong_long, wrong_short], SEVEN, folder)
    assert greedy.scored[1].reward > greedy.scored[0].reward, "where failures pay, guessing is the cheaper failure"
    args = {"per_call": 0.0, "per_turn": 0.1}
    settings = {"components": {"right": {"function": "answer"}, "e": {"function": "efficiency", "args": args}}}
    fair = await scored(settings, [wrong_long, wrong_short], SEVEN, folder)
    assert [each.reward for each in fair.scored] == [0.0, 0.0], "the default pays it for success alone"


def _turns_of_three(reward: float, index: int) -> Scored:
    entries = [policy("a"), answered("x"), policy("b"), answered("y"), policy("c")]
    return Scored(rollout(*entries, index=index), {"right": reward}, reward, (0.0,) * 3, reward > 0, 0.0)


def _credited(values: list[list[float]] | None = None, **credit: Any) -> list[list[float]]:
    """By rollout, what each of its turns' tokens is credited with: two rollouts of three turns, one of them right."""
    from trainer.learn.lesson import lesson
    from trainer.learn.rounds import every
    from trainer.learn.settings import AlgorithmSettings
    from trainer.learn.worth import rows

    settings = AlgorithmSettings.model_validate({"name": "dr_grpo", "credit": credit})
    group = ScoredGroup(SEVEN, (_turns_of_three(1.0, 0), _turns_of_three(0.0, 1)))
    made = rows(lesson([group], settings, every), settings, values=values)
    return [[value for value, mine in zip(row.advantages, row.mask, strict=True) if mine] for row in made.made]


def test_credit_is_shared_by_all_turns() -> None:
    right, wrong = _credited(kind="outcome")
    assert right == pytest.approx([0.5] * 3) and wrong == pytest.approx([-0.5] * 3)


def test_credit_shrinks_with_the_distance_to_the_outcome() -> None:
    gamma = 0.95
    right, wrong = _credited(kind="discounted", discount=gamma)
    assert right == pytest.approx([0.5 * gamma**2, 0.5 * gamma, 0.5])
    assert wrong == pytest.approx([-value for value in right])


def test_a_critic_says_what_each_turn_added_to_what_it_expected() -> None:
    expects = {0: [0.25, 0.5, 0.75], 1: [0.25, 0.25, 0.0]}
    length = len(rollout(policy("a"), answered("x"), policy("b"), answered("y"), policy("c")).ledger)
    mine = [at for at, written in enumerate(_turns_of_three(1.0, 0).rollout.ledger.mask) if written]
    values = [[0.0] * length for _ in expects]
    for number, said in expects.items():
        for at, value in zip(mine, said, strict=True):
            values[number][at] = value
    right, wrong = _credited(values, kind="gae", discount=1.0, trust=0.0)
    assert right == pytest.approx([0.25, 0.25, 0.25]), "each turn's own part in what was reached"
    assert wrong == pytest.approx([0.0, -0.25, 0.0])
    whole, _ = _credited(values, kind="gae", discount=1.0, trust=1.0)
    assert whole == pytest.approx([0.75, 0.5, 0.25]), "or all that followed, against what was expected"
