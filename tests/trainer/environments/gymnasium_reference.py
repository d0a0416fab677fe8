"""Plays scripted episodes with Gymnasium alone, and prints observations and rewards as JSON.

    python gymnasium_reference.py FrozenLake-v1 '[[SEED, [ACTION, ...]], ...]'

Runs with the Python that has Gymnasium.
"""

from __future__ import annotations

import json
import sys

import gymnasium


def play(name: str, seed: int, actions: list[int]) -> dict[str, object]:
    """One episode, until it ends or the script does."""
    environment = gymnasium.make(name, render_mode="ansi" if name != "Blackjack-v1" else None)
    environment.reset(seed=seed)
    rewards, terminated, truncated = [], False, False
    for action in actions:
        _, reward, terminated, truncated, _ = environment.step(action)
        rewards.append(float(reward))
        if terminated or truncated:
            break
    environment.close()
    return {"rewards": rewards, "terminated": bool(terminated), "truncated": bool(truncated)}


if __name__ == "__main__":
    episodes = json.loads(sys.argv[2])
    sys.stdout.write(json.dumps([play(sys.argv[1], seed, actions) for seed, actions in episodes]))
