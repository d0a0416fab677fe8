"""Tests async reward functions: blocking, hanging and failing ones do not affect the run's event loop."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import anyio
import pytest

from tests.trainer.reward.attempts import TASK, Write, answer_group, reward_settings
from trainer.reward.scorer import ScoredGroup, Scorer

COMPONENT = {"function": "my_rewards.py:score"}


def make_scorer(folder: Path, timeout_s: float = 20.0, **variables: object) -> Scorer:
    scorer = Scorer(reward_settings(mine=COMPONENT | {"timeout_s": timeout_s}), folder)
    for name, value in variables.items():
        setattr(sys.modules["my_rewards"], name, value)
    return scorer


def reasons(group: ScoredGroup) -> list[str]:
    return [failure.reason for failure in group.failed]


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


async def test_blocking_async_function_does_not_block_the_run(write: Write, released: threading.Event) -> None:
    started = threading.Event()
    source = BLOCKING.format("started.set(); released.wait()")
    scorer = make_scorer(write(source), released=released, started=started)
    with anyio.fail_after(60):
        async with anyio.create_task_group() as scoring:
            scoring.start_soon(scorer.score, TASK, answer_group("#### 8"))
            await anyio.to_thread.run_sync(started.wait, 15)
            released.set()  # Runs in the event loop, which would be blocked otherwise.


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
