"""An alarm about a rank or a rollout worker that is persistently slower than the others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from trainer.train.alarm_input import AlarmInput, format_alarm

STRAGGLER_STEPS = 5
"""Steps in a row in which it must have been slow."""
SLOW_RANK, SLOW_WORKER = 1.5, 2.0
"""How many times slower than the median of the others."""
MIN_TURN_S = 0.05
"""A worker that answers within this time is fast enough, whatever the others do."""
RANK_PREFIX, WORKER_PREFIX = "distributed/tokens_per_s/", "workers/turn_s/"


@dataclass(frozen=True, slots=True)
class Straggler:
    """Who is slow, and by how much at least."""

    name: str
    times: float
    is_rank: bool


def find_straggler(history: Sequence[Mapping[str, float]]) -> Straggler | None:
    """The slowest of those that were slow in each of the latest steps; None if there is none."""
    steps = list(history)[-STRAGGLER_STEPS:]
    if len(steps) < STRAGGLER_STEPS:
        return None
    ranks = [_rank_seconds(metrics) for metrics in steps]
    workers = [_read(metrics, WORKER_PREFIX) for metrics in steps]
    found = [
        *(Straggler(name.replace("_", " "), times, True) for name, times in _find_slow(ranks, SLOW_RANK)),
        *(
            Straggler(name, times, False)
            for name, times in _find_slow(workers, SLOW_WORKER)
            if min(seconds[name] for seconds in workers) > MIN_TURN_S
        ),
    ]
    return max(found, key=lambda straggler: straggler.times, default=None)


def _find_slow(steps: Sequence[Mapping[str, float]], least: float) -> list[tuple[str, float]]:
    """Those that took at least so many times longer than the median of the others in all steps."""
    slow = []
    for name in sorted(set.intersection(*(set(seconds) for seconds in steps))):
        others = [[value for other, value in seconds.items() if other != name] for seconds in steps]
        if all(others):
            times = min(seconds[name] / median(rest) for seconds, rest in zip(steps, others, strict=True))
            slow += [(name, times)] if times >= least else []
    return slow


def _rank_seconds(metrics: Mapping[str, float]) -> dict[str, float]:
    """The seconds of each rank for a token: a rank with more to compute is not slow."""
    return {name: 1 / speed for name, speed in _read(metrics, RANK_PREFIX).items()}


def _read(metrics: Mapping[str, float], prefix: str) -> dict[str, float]:
    found = {name.removeprefix(prefix): value for name, value in metrics.items() if name.startswith(prefix)}
    return {name: value for name, value in found.items() if value > 0}


def check_stragglers(given: AlarmInput) -> str | None:
    """Alarms if a rank or a rollout worker is persistently slower than the others."""
    straggler = find_straggler(given.history)
    if straggler is None:
        return None
    if straggler.is_rank:
        return format_alarm(
            f"{straggler.name} takes {straggler.times:.1f} times as long for a token as the other ranks",
            "its GPU is throttled or shared with another process; all ranks wait for it in every layer",
            "look at that machine's clocks, temperature and processes, or leave it out: `--resume` takes any number of"
            " ranks",
        )
    return format_alarm(
        f"the rollout worker {straggler.name} takes {straggler.times:.1f} times as long between turns as the others",
        "its machine is overloaded or far away, or its own tool servers are slow",
        "look at that machine's load; end that worker, or start more of them elsewhere",
    )
