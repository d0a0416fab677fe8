"""What a user of TRL has: a tool, reward functions and an environment, as TRL's guides ask for them."""

from __future__ import annotations

from typing import Any

PRICES = {"apple": 2, "pear": 3}


def price(item: str) -> int:
    """Looks up what one piece of an item costs.

    Args:
        item: the name of the item, in lower case

    Returns:
        The price of one piece, in coins.
    """
    return PRICES[item]


class Recorder:
    """A reward function that keeps its arguments, and gives each completion its number; nothing to the first."""

    __name__ = "recorder"

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def __call__(
        self, prompts: list[Any], completions: list[Any], completion_ids: list[list[int]], **kwargs: Any
    ) -> list[float | None]:
        self.calls.append({"prompts": prompts, "completions": completions, "completion_ids": completion_ids, **kwargs})
        return [float(index) if index else None for index in range(len(prompts))]


class Safe:
    """An environment with state."""

    made = 0

    def __init__(self) -> None:
        type(self).made += 1
        self.rows: list[dict[str, Any]] = []

    def reset(self, **row: Any) -> str:
        self.rows.append(row)
        self.code, self.tries = row.get("code", 7), 0
        return "The dial shows 0."

    def dial(self, number: int) -> str:
        """Turns the dial.

        Args:
            number: from 0 to 9

        Returns:
            What is heard.
        """
        self.tries += 1
        return "click" if number == self.code else "nothing"

    def _hidden(self) -> None: ...

    def get_reward(self) -> float:
        return float(self.tries)
