"""A stand-in for TextArena with two games: guess a number alone, and take turns to say a higher number."""

from __future__ import annotations

import random


class Guess:
    """One player; draws from the global generator, as TextArena's games do."""

    def __init__(self, most: int = 20) -> None:
        self.most = most

    def reset(self, num_players, seed=None):
        assert num_players == 1
        random.seed(seed)
        self.secret, self.text, self.rewards, self.tries = (
            random.randint(1, self.most),
            f"[GAME] Up to {self.most}.",
            {},
            0,
        )

    def get_observation(self):
        return 0, self.text

    def step(self, action):
        self.tries += 1
        self.text += f"\n[Player 0] {action}"
        if action == f"[{self.secret}]":
            self.rewards = {0: 1.0 / self.tries}
            return True, {}
        if random.random() < 0.5:  # Hints come or do not come, by the global generator.
            self.text += f"\n[GAME] It is {'even' if self.secret % 2 == 0 else 'odd'}."
        return False, {}

    def close(self):
        return self.rewards, {0: {"reason": "That is right."}}


class Higher:
    """Two players or more; who says a number that is not higher loses."""

    def reset(self, num_players, seed=None):
        if num_players < 2:
            raise AssertionError("two at least")
        self.players, self.turn, self.last, self.texts = (
            num_players,
            0,
            0,
            [["[GAME] Begin."] for _ in range(num_players)],
        )

    def get_observation(self):
        seat = self.turn % self.players
        return seat, [(-1, text, None) for text in self.texts[seat]]

    def step(self, action):
        seat, number = self.turn % self.players, int(action.strip("[]") or 0)
        if number <= self.last:
            self.rewards = {each: -1 if each == seat else 1 for each in range(self.players)}
            return True, {}
        self.last, self.turn = number, self.turn + 1
        for texts in self.texts:
            texts.append(f"Player {seat} said {number}: say [{number + 1}] or [{number}]")
        return False, {}

    def close(self):
        return self.rewards, {}


GAMES = {"Guess-v0": Guess, "Higher-v0": Higher}


def make(env_id, **kwargs):
    if env_id == "Modern-v0":
        compile('f"{row["x"]}"', "env.py", "exec")
    if env_id == "Numbers-v0":
        raise ImportError("Could not import textarena.envs.Numbers. Error: No module named 'no_such_numpy'")
    if env_id == "Judged-v0":
        raise ValueError("Please set the OPENROUTER_API_KEY environment variable.")
    if env_id not in GAMES:
        raise ValueError(f"Environment {env_id} not found in registry.")
    return GAMES[env_id](**kwargs)
