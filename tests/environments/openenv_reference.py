"""Plays scripted episodes with OpenEnv's own client, and prints observations and rewards as JSON.

    python openenv_reference.py URL < [[SEED, [ACTION, ...]], ...]

Runs with the Python that has OpenEnv.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from openenv.core.generic_client import GenericEnvClient


async def play(url: str, seed: int, actions: list[dict[str, Any]]) -> dict[str, Any]:
    """One episode, until it ends or the script does."""
    async with GenericEnvClient(base_url=url) as client:
        result = await client.reset(seed=seed)
        observations, rewards = [result.observation], list[float]()
        for action in actions:
            result = await client.step(action)
            observations.append(result.observation)
            rewards.append(float(result.reward))
            if result.done:
                break
        return {"observations": observations, "rewards": rewards, "done": bool(result.done)}


async def main() -> None:
    """Plays one episode after the other."""
    played = [await play(sys.argv[1], seed, actions) for seed, actions in json.load(sys.stdin)]
    sys.stdout.write(json.dumps(played))


if __name__ == "__main__":
    asyncio.run(main())
