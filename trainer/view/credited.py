"""What a step made of a rollout, ledger by ledger; or why none learned from it, though it was scored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trainer.run.credits import Credit, Credits, step_of
from trainer.run.rollout import Rollout


@dataclass(frozen=True, slots=True)
class Credited:
    ledgers: tuple[Sequence[Credit], ...] = ()
    """Of each ledger as the model sees it; empty of one in which the policy wrote nothing."""
    nothing: str = ""
    """Why nothing was learned from it; empty where something was, or nobody knows."""

    @classmethod
    def of(cls, rollout: Rollout, credits: Credits) -> Credited:
        told = credits.of_rollout(rollout)
        if told is None:
            return cls(nothing=_nothing(rollout, credits))
        own = iter(told)
        return cls(tuple(next(own, ()) if any(ledger.mask) else () for ledger in rollout.ledgers))

    def tokens(self, ledger: int) -> list[Credit]:
        """Of each token of a ledger as the model sees it; none where nobody knows."""
        told = self.ledgers[ledger] if self.ledgers else ()
        return [(1, advantage, weight) for many, advantage, weight in told for _ in range(many)]


UNKNOWN = Credited()


def _nothing(rollout: Rollout, credits: Credits) -> str:
    step, steps = step_of(rollout), credits.steps
    if step is None or not steps or not any(turn.ids for turn in rollout.turns):
        return ""
    if not step:
        return (
            "no step learned from its group, which was too stale by then (`max_staleness`), taught nothing"
            " (`algorithm.dynamic`), or came too late"
        )
    if step > max(steps):
        return f"step {step}, which it was made for, has not learned from it"
    if step in steps:
        return f"step {step} did not learn from its group, which taught nothing and was replaced (`algorithm.dynamic`)"
    return ""
