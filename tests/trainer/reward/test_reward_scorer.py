"""Tests reward settings, sums and metrics of components, users' functions: results, errors, deadlines, batches."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest
from pydantic import ValidationError

from gateway.errors import ConfigError
from tests.trainer.reward.attempts import (
    FEEDBACK_TASK,
    TASK,
    answer_group,
    call_turn,
    feedback_entry,
    make_rollout,
    reward_settings,
    score_group,
    tool_entry,
)
from tests.trainer.sample_rollouts import policy
from trainer.reward.scorer import ScoredGroup, Scorer, compute_reward_metrics
from trainer.reward.settings import RewardSettings
from trainer.rollout.rollout import StopReason

Write = Callable[[str], Path]
COMPONENT = {"function": "my_rewards.py:score"}
RIGHT = {"function": "answer"}
UNLESS_RIGHT = "def score(attempt):\n    if attempt.answer == '#### 7':\n        return 1.0\n    {}\n"


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """A function that writes my_rewards.py, and returns its folder."""

    def write_file(text: str) -> Path:
        (tmp_path / "my_rewards.py").write_text(text)
        return tmp_path

    return write_file


@pytest.fixture
def released() -> Iterator[threading.Event]:
    """What hanging functions wait for, so that no thread outlives its test."""
    event = threading.Event()
    yield event
    event.set()


def reasons(group: ScoredGroup) -> list[str]:
    return [failure.reason for failure in group.failed]


def indices(group: ScoredGroup) -> list[int]:
    return [scored.rollout.index for scored in group.scored]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return 1 / 0", "raised ZeroDivisionError: division by zero ("),
        ("raise ValueError('invalid')", "my_rewards.py:4)"),
        ("raise ExceptionGroup('several', [KeyError('it')])", "raised KeyError: 'it'"),
        ("raise ValueError('x' * 9999)", "raised ValueError: xxx"),
        ("return None", "returned None"),
        ("return float('nan')", "returned nan"),
        ("return 10**400", "returned 1000"),
        ("return 10**9999", "returned a int"),
        ("return -1e300", "returned -1e+300"),
    ],
)
async def test_invalid_result_fails_the_rollout_with_a_reason(
    write: Write, caplog: pytest.LogCaptureFixture, body: str, message: str
) -> None:
    folder = write(UNLESS_RIGHT.format(body))
    with caplog.at_level(logging.WARNING):
        group = await score_group(folder, answer_group("#### 7", "#### 8"), right=RIGHT, mine=COMPONENT)
    (reason,) = reasons(group)
    assert [scored.reward for scored in group.scored] == [2.0]
    assert message in reason and reason in caplog.text and len(reason) < 900
    assert reason.startswith("component 'mine' (my_rewards.py:score) ") and reason.endswith("; rollout 0-0/one/1")
    assert compute_reward_metrics([group])["reward/failed"] == 1.0


@pytest.mark.parametrize("kind", ["def", "async def"])
@pytest.mark.parametrize(
    "value", ["3", "2.5", "True", "__import__('numpy').float32(0.5)", "__import__('torch').tensor(1.5)"]
)
async def test_finite_numbers_of_sync_and_async_functions_count(write: Write, kind: str, value: str) -> None:
    folder = write(f"{kind} score(attempt, extra):\n    return {value} + extra\n")
    group = await score_group(folder, answer_group("what"), mine=COMPONENT | {"args": {"extra": 1}})
    assert group.scored[0].reward == eval(value) + 1


async def test_function_sees_row_chat_and_success(write: Write) -> None:
    folder = write(
        "def score(attempt):\n"
        "    assert attempt.truth == attempt.task.truth and attempt.messages[0]['role'] == 'user'\n"
        "    assert len(attempt.ledger) and not attempt.truncated and not attempt.rewards and not attempt.infos\n"
        "    return attempt.columns['level'] * attempt.success\n"
    )
    group = await score_group(folder, answer_group("#### 7", "#### 8"), right=RIGHT, mine=COMPONENT)
    assert [scored.components["mine"] for scored in group.scored] == [2.0, 0.0]


async def test_hanging_function_does_not_delay_other_groups(write: Write, released: threading.Event) -> None:
    folder = write("released = None\ndef score(attempt):\n    return attempt.truth == '7' or released.wait() or 0\n")
    scorer = Scorer(reward_settings(mine=COMPONENT), folder)
    sys.modules["my_rewards"].released = released  # type: ignore[attr-defined]
    with anyio.fail_after(60):
        async with anyio.create_task_group() as groups:
            other = type(TASK)("two", TASK.messages, truth="8")
            groups.start_soon(scorer.score, other, answer_group("#### 8"))
            group = await scorer.score(TASK, answer_group("#### 7"))
            released.set()
    assert indices(group) == [0]


async def test_batched_function_scores_its_group_in_order(write: Write) -> None:
    folder = write(
        "def score(attempts, by):\n    ranks = sorted(attempt.answer for attempt in attempts)\n"
        "    return [ranks.index(attempt.answer) * by for attempt in attempts]\n"
        "async def array(attempts):\n    import numpy\n    return numpy.arange(len(attempts))\n"
    )
    ranked = COMPONENT | {"batched": True, "args": {"by": 0.5}}
    placed = {"function": "my_rewards.py:array", "batched": True}
    group = await score_group(folder, answer_group("c", "a", "b"), ranked=ranked, placed=placed)
    assert [scored.components for scored in group.scored] == [
        {"ranked": 1.0, "placed": 0.0},
        {"ranked": 0.0, "placed": 1.0},
        {"ranked": 0.5, "placed": 2.0},
    ]


SOURCE = """
class Needy:
    def __init__(self, what):
        self.what = what
number = 3
def score(attempt, scale):
    return scale
"""


@pytest.mark.parametrize(
    ("component", "message"),
    [
        ({"function": "score"}, "(?s)unknown reward function 'score'.*use one of answer, .*`rewards.py:score`"),
        ({"function": "my_rewards.py:scor"}, "(?s)has no 'scor'.*did you mean 'score'"),
        ({"function": "my_rewards.py:Needy"},
         "(?s)cannot be instantiated without arguments: TypeError.*name an instance"),
        ({"function": "my_rewards.py:number"}, "is a int, not a function"),
        (COMPONENT, r"(?s)takes \(attempt, scale\): missing a required argument: 'scale'.*remedy: define it as"),
        (RIGHT | {"args": {"strict": True}},
         "(?s)unexpected keyword argument 'strict'.*remedy: its arguments are: method"),
        (RIGHT | {"batched": True}, "(?s)scores one attempt.*leave it out"),
        (RIGHT | {"args": {"method": "loose"}}, "(?s)components.mine.args.method: .*'strict' or 'flexible'"),
        ({"function": "efficiency", "args": {"per_call": -1.0}}, "args.per_call: .*greater than or equal to 0"),
    ],
)  # fmt: skip
def test_invalid_component_is_rejected_before_the_run(write: Write, component: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        Scorer(reward_settings(mine=component), write(SOURCE))
    assert "remedy:" in str(caught.value) and "reward.components.mine." in str(caught.value)


def make_scorer(folder: Path, timeout_s: float = 20.0, **variables: object) -> Scorer:
    scorer = Scorer(reward_settings(mine=COMPONENT | {"timeout_s": timeout_s}), folder)
    for name, value in variables.items():
        setattr(sys.modules["my_rewards"], name, value)
    return scorer


BLOCKING = "released = None\nasync def score(attempt):\n    if attempt.answer == '#### 8':\n        {}\n    return 1\n"


async def test_blocking_async_function_costs_its_rollout_and_no_later_one(
    write: Write, released: threading.Event
) -> None:
    scorer = make_scorer(write(BLOCKING.format("released.wait()")), 0.05, released=released)
    with anyio.fail_after(60):
        group = await scorer.score(TASK, answer_group("#### 8"))
        assert "returned nothing within 0.05 s, its `timeout_s`; rollout" in reasons(group)[0] and group.scored == ()
        component = scorer._components["mine"]
        component.settings = component.settings.model_copy(update={"timeout_s": 20.0})  # The test is not about speed.
        assert [scored.reward for scored in (await scorer.score(TASK, answer_group("#### 7"))).scored] == [1.0]


async def test_calls_queued_behind_a_blocked_one_are_dropped_after_the_deadline(
    write: Write, released: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.reward.function_runner.LOOP_CHECK_S", 0.01)
    folder = write(
        "released, called = None, []\nasync def score(attempt):\n    called.append(attempt)\n"
        "    released.wait()\n    return 1\n"
    )
    group = await make_scorer(folder, 1, released=released).score(TASK, answer_group("a", "b", "c"))
    assert len(group.failed) == 3 and all("returned nothing within 1 s" in reason for reason in reasons(group))
    (loop,) = [thread for thread in threading.enumerate() if thread.name == "rewards" and thread.is_alive()][-1:]
    released.set()
    await anyio.to_thread.run_sync(loop.join, 20)
    assert not loop.is_alive() and len(sys.modules["my_rewards"].called) == 1


async def test_reward_is_the_weighted_sum_of_components() -> None:
    won = make_rollout(call_turn("add"), tool_entry("7"), policy("#### 7"))
    group = await score_group(
        None,
        [won, *answer_group("#### 8")],
        right={"function": "answer", "weight": 2.0},
        tidy={"function": "efficiency", "weight": 0.5, "args": {"per_call": 0.25}},
    )
    first, second = group.scored
    assert (first.reward, first.success, first.components) == (1.875, True, {"right": 1.0, "tidy": -0.25})
    assert (second.reward, second.success, second.components) == (0.0, False, {"right": 0.0, "tidy": 0.0})
    assert first.rollout.rewards == first.components and first.rollout.ledger is won.ledger
    assert group.task is TASK and group.failed == ()


async def test_turn_scores_are_weighted_like_the_components_that_sum_them() -> None:
    rollouts = [
        make_rollout(
            call_turn("add"), tool_entry("3", reward=0.5), policy("3"), feedback_entry("No.", -1.0), policy("#### 7")
        )
    ]
    weighted = await score_group(
        None, rollouts, tools={"function": "tools", "weight": 0.5}, right={"function": "answer"}
    )
    assert weighted.scored[0].turn_scores == (0.25, -1.0, 0.0)
    assert (weighted.scored[0].reward, weighted.scored[0].reward_from_turns) == (1.25, 0.25)
    plain = await score_group(None, rollouts, right={"function": "answer"})
    assert (plain.scored[0].turn_scores, plain.scored[0].reward_from_turns) == ((0.5, -1.0, 0.0), 0.0)
    end = {"function": "outcome", "weight": 2.0}
    with_feedback = [
        make_rollout(
            policy("8"),
            feedback_entry("No.", 0.25),
            policy("#### 7"),
            feedback_entry("", 0.5),
            stop=StopReason.FEEDBACK_DONE,
        )
    ]
    both = (await score_group(None, with_feedback, FEEDBACK_TASK, end=end)).scored[0]
    assert (both.reward, both.turn_scores, both.reward_from_turns) == (1.5, (0.5, 1.0), 1.5)


async def test_rollout_ended_by_infrastructure_is_not_scored() -> None:
    broken = make_rollout(policy("#### 7"), stop=StopReason.TOOL_FAILED, index=3)
    group = await score_group(None, [broken, *answer_group("#### 7")], right={"function": "answer"})
    assert [scored.rollout.index for scored in group.scored] == [0]
    assert [failure.reason for failure in group.failed] == ["rollout 0-0/one/3 ended with tool_failed"]


async def test_metrics_have_each_component_and_count_failures() -> None:
    right, gave = {"function": "answer", "weight": 2.0}, {"function": "calc_reward"}
    rollouts = [*answer_group("#### 7"), make_rollout(policy("#### 8"), rewards={"end": -1.0})]
    groups = [
        await score_group(None, rollouts, right=right, gave=gave),
        await score_group(None, [make_rollout(stop=StopReason.ERROR)], right=right, gave=gave),
    ]
    assert compute_reward_metrics(groups) == {
        "reward/failed": 1.0,
        "reward/mean": 0.5,
        "reward/std": 1.5,
        "reward/right": 0.5,
        "reward/gave": -0.5,
        "success/sampled": 0.5,
    }
    assert compute_reward_metrics(groups[1:]) == {"reward/failed": 1.0} and compute_reward_metrics([]) == {
        "reward/failed": 0.0
    }


def test_first_component_decides_success_by_default() -> None:
    settings = RewardSettings.model_validate({"components": {"right": RIGHT, "tidy": {"function": "efficiency"}}})
    assert settings.success_component == "right" and settings.components["tidy"].weight == 1.0
    assert settings.model_copy(update={"success": "tidy"}).success_component == "tidy"
    assert RewardSettings().success_component == "answer"
    assert RewardSettings.model_validate(settings.model_dump()) == settings


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"components": {}}, "at least 1"),
        ({"components": {"mean": RIGHT}}, "the component name 'mean' is reserved for a metric of all components"),
        ({"components": {"a b": RIGHT}}, "pattern"),
        ({"components": {"right": RIGHT}, "success": "wrong"}, "success is 'wrong', which is none of right"),
        ({"components": {"right": RIGHT | {"weight": float("nan")}}}, "weight"),
    ],
)
def test_invalid_settings_are_rejected(raw: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        RewardSettings.model_validate(raw)
