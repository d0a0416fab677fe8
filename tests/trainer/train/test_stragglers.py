"""A rank or a rollout worker that is persistently slower than the others is an alarm; idle shares by role."""

from __future__ import annotations

import pytest

from mtrl_plugins.workers.worker_link import WorkerClock
from tests.trainer.train.test_alarms import check_steps
from trainer.train.alarms import STRAGGLER_STEPS

Metrics = dict[str, float]


def rank_speeds(*speeds: float) -> Metrics:
    return {f"distributed/tokens_per_s/rank_{rank}": speed for rank, speed in enumerate(speeds)}


def worker_turns(**seconds: float) -> Metrics:
    return {f"workers/turn_s/{name}": value for name, value in seconds.items()}


@pytest.mark.parametrize(
    ("slow", "even", "told"),
    [
        (rank_speeds(100, 110, 40, 90), rank_speeds(100, 110, 80, 90), "rank 2 takes 2.5 times as long for a token"),
        (worker_turns(a=0.1, b=0.4), worker_turns(a=0.1, b=0.15), "the rollout worker b takes 4.0 times as long"),
        (rank_speeds(100, 10) | worker_turns(a=0.1, b=0.4), {}, "rank 1 takes 10.0 times as long"),
    ],
)
def test_straggler_is_an_alarm_once_it_was_slow_in_each_of_several_steps(
    slow: Metrics, even: Metrics, told: str
) -> None:
    (alarm,) = check_steps(*[slow] * STRAGGLER_STEPS)
    assert alarm.startswith(told)
    assert check_steps(*[slow] * (STRAGGLER_STEPS - 1)) == []
    assert check_steps(*([slow] * (STRAGGLER_STEPS - 1) + [even]) * 3) == [], "slow now and then"


def test_worker_is_idle_while_all_its_rollouts_wait_for_the_engine() -> None:
    now = 0.0
    clock = WorkerClock(lambda: now)
    now = 2.0
    clock.hold(1)
    clock.hold(2)
    now = 3.0
    clock.release(1)
    now = 5.0
    clock.release(2)
    clock.release(2)
    now = 10.0
    assert clock.take_metrics("a") == {"workers/idle/a": 0.7, "workers/turn_s/a": 2.0}
    now = 12.0
    assert clock.take_metrics("a") == {"workers/idle/a": 1.0}
