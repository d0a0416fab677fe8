"""Plays scripted games with TextArena alone, as its documentation does, and prints what the policy saw and its reward.

    python textarena_reference.py < {"name": ..., "opponent": [MOVE, ...], "episodes": [[SEED, [MOVE, ...]], ...]}

Runs with the Python that has TextArena. The policy has the first seat; each other seat plays the opponent's moves.
"""

from __future__ import annotations

import json
import os
import random
import sys
from itertools import cycle
from typing import Any

import textarena


class ScriptedAgent(textarena.Agent):
    """Plays a list of moves, and keeps what it saw. Raises IndexError when there are no more."""

    def __init__(self, moves: Any) -> None:
        super().__init__()
        self.moves, self.seen = iter(moves), list[str]()

    def __call__(self, observation: Any) -> str:
        text = observation if isinstance(observation, str) else "\n".join(message[1] for message in observation)
        self.seen.append(text)
        move = next(self.moves, None)
        if move is None:
            raise IndexError("no more moves")
        return str(move)


def count_players(name: str) -> int:
    """The fewest players that the game takes."""
    for players in range(1, 16):
        try:
            textarena.make(name).reset(num_players=players, seed=0)
            return players
        except Exception:
            continue
    raise ValueError(name)


def play(name: str, players: int, seed: int, moves: list[str], opponent: list[str]) -> dict[str, Any]:
    """One game, until it ends or the script does."""
    random.seed(seed)
    game = textarena.make(name)
    game.reset(num_players=players, seed=seed)
    agents = [ScriptedAgent(moves if seat == 0 else cycle(opponent)) for seat in range(players)]
    done, rewards = False, None
    while not done:
        seat, observation = game.get_observation()
        try:
            move = agents[seat](observation)
        except IndexError:
            break
        done, _ = game.step(action=move)
    if done:
        rewards, _ = game.close()
    return {"seen": agents[0].seen, "done": done, "reward": float(rewards[0]) if rewards else 0.0}


def main() -> None:
    """Plays all games; what they print goes to standard error."""
    job = json.load(sys.stdin)
    wire, _ = os.dup(1), os.dup2(2, 1)
    players = count_players(job["name"])
    played = [play(job["name"], players, seed, moves, job["opponent"]) for seed, moves in job["episodes"]]
    with os.fdopen(wire, "w") as output:
        output.write(json.dumps(played))


if __name__ == "__main__":
    main()
