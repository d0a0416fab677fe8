"""The reward function of environments of other frameworks: the environment's own score, or one of its metrics."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from mtrl_plugins.environments.episodes import INFO
from mtrl_plugins.environments.host_process import EnvironmentFailed, hosts
from trainer.reward.attempt import Attempt

log = logging.getLogger(__name__)


def environment_reward(attempts: Sequence[Attempt], metric: str | None = None) -> list[float | None]:
    """The environment's reward for each attempt, or one of its metrics; None for rollouts that it has lost.

    Metrics of episodes are `steps`, `terminated` and `truncated`. A runner scores a group's rollouts together.
    """
    infos = [attempt.infos.get(INFO) or {} for attempt in attempts]  # An episode's score is known from its steps.
    scores: list[Mapping[str, Any] | None] = [
        {"reward": info["return"], "metrics": info} if "return" in info else {} for info in infos
    ]
    for key, starts in {_host_of(attempt) for attempt, score in zip(attempts, scores, strict=True) if not score}:
        host = hosts.get(key)
        if host is None:
            log.warning("rollouts are not scored: their environment is not open in this process")
            continue
        places = [
            place for place, attempt in enumerate(attempts) if not scores[place] and _host_of(attempt) == (key, starts)
        ]
        names = [attempts[place].infos[INFO]["rollout"] for place in places]
        for place, score in zip(places, host.score(starts, names), strict=True):
            scores[place] = score
    return [_pick(score, metric) for score in scores]


def _host_of(attempt: Attempt) -> tuple[str, int]:
    info = attempt.infos.get(INFO)
    if info is None:
        raise EnvironmentFailed(f"{attempt.rollout.name} is not a rollout of an environment")
    return info["host"], info["starts"]


def _pick(score: Mapping[str, Any] | None, metric: str | None) -> float | None:
    if not score:
        return None
    if error := score.get("error"):
        log.warning("a rollout is not scored: %s", error)
    value = score.get("reward") if metric is None else score.get("metrics", {}).get(metric)
    return None if value is None else float(value)
