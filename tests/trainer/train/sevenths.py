"""A reward that random weights earn sometimes, and that depends on nothing but ids."""

from __future__ import annotations

from trainer.reward.attempt import Attempt


def sevenths(attempt: Attempt) -> float:
    """The share of the policy's ids that seven divides."""
    ids = [id for turn in attempt.turns for id in turn.ids]
    return sum(id % 7 == 0 for id in ids) / max(1, len(ids))


async def async_sevenths(attempt: Attempt) -> float:
    """The same without a thread."""
    return sevenths(attempt)
