"""Plays scripted episodes with Gymnasium alone, and prints observations and rewards as JSON.

    python gymnasium_reference.py FrozenLake-v1 < [[SEED, [ACTION, ...]], ...]

Runs with the Python that has Gymnasium.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import gymnasium
import numpy


def play(name: str, seed: int, actions: list[Any]) -> dict[str, Any]:
    """One episode, until it ends or the script does."""
    environment = gymnasium.make(name)
    observation, _ = environment.reset(seed=seed)
    observations, rewards, terminated, truncated = [to_json(observation)], list[float](), False, False
    for action in actions:
        value = numpy.array(action, environment.action_space.dtype) if isinstance(action, list) else action
        observation, reward, terminated, truncated, _ = environment.step(value)
        observations.append(to_json(observation))
        rewards.append(float(reward))
        if terminated or truncated:
            break
    environment.close()
    ended = {"terminated": bool(terminated), "truncated": bool(truncated)}
    return {"observations": observations, "rewards": rewards, **ended}


def to_json(value: Any) -> Any:
    """An observation with lists instead of arrays."""
    if isinstance(value, tuple):
        return [to_json(item) for item in value]
    return value.tolist() if hasattr(value, "tolist") else value


if __name__ == "__main__":
    sys.stdout.write(json.dumps([play(sys.argv[1], seed, actions) for seed, actions in json.load(sys.stdin)]))
