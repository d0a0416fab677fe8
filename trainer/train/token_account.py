"""Accounts for the tokens of a step: each one that was sampled is trained once, or left out for a named reason."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from trainer.algorithms.packing import BatchRow
from trainer.algorithms.token_weights import excluded_tokens
from trainer.reward.scorer import ScoredGroup
from trainer.rollout.rollout import Rollout
from trainer.train.collect import StepRollouts

Key = tuple[str, int]
"""A rollout's group and index."""


class TokenAccountError(AssertionError):
    """Tokens were lost or trained twice."""


@dataclass(frozen=True, slots=True)
class TokenAccount:
    """What became of the tokens that were sampled for a step."""

    sampled: int
    trained: int
    left_out: Counter[str]
    """By reason."""

    def check(self) -> None:
        """Raises TokenAccountError unless sampled = trained + left out."""
        if self.sampled != self.trained + self.left_out.total():
            reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(self.left_out.items())) or "none"
            raise TokenAccountError(
                f"{self.sampled} tokens were sampled, but {self.trained} were trained and {self.left_out.total()} left"
                f" out ({reasons}); the weights of this step are not published\n  remedy: report this as a bug, with"
                " the run's folder; --resume goes on from the last saved step"
            )

    @property
    def metrics(self) -> dict[str, float]:
        counts = {"sampled": self.sampled, "trained": self.trained}
        counts |= {f"left_out/{reason}": count for reason, count in sorted(self.left_out.items())}
        return {f"tokens/{name}": float(count) for name, count in counts.items()}


def account_for_tokens(
    step: StepRollouts, rows: Sequence[BatchRow] = (), trained_rows: Sequence[BatchRow] = ()
) -> TokenAccount:
    """Accounts for a step. `rows` are those of its batch, `trained_rows` those of them that have a gradient.

    What was sampled is counted in the rollouts as they ended (for agents at the engine), what was trained in the
    batch. Raises TokenAccountError if they do not agree.
    """
    reasons = _reasons_by_rollout(step)
    left_out: Counter[str] = Counter()
    for rollout in step.finished:
        left_out["discarded"] += _agent_count(rollout, "discarded", 0)
        if (
            reason := "infrastructure"
            if rollout.stop.is_infrastructure
            else reasons.get(_key(rollout), "dropped_group")
        ):
            left_out[reason] += _count_recorded(rollout)
    excluded = sum(_count_excluded(rollout) for rollout in _scored(step.groups))
    trained_ids = {id(row) for row in trained_rows}
    left_out["excluded"] += excluded
    left_out["credit_rounds"] += sum(map(_count_unweighted, rows)) - excluded
    left_out["no_gradient"] += sum(_count_weighted(row) for row in rows if id(row) not in trained_ids)
    sampled = sum(_agent_count(rollout, "sampled", _count_recorded(rollout)) for rollout in step.finished)
    account = TokenAccount(sampled, sum(map(_count_weighted, trained_rows)), +left_out)
    account.check()
    return account


def _reasons_by_rollout(step: StepRollouts) -> dict[Key, str]:
    """Why each scored rollout is left out as a whole; empty for those in the batch."""
    reasons = {_key(rollout): "" for rollout in _scored(step.groups)}
    reasons |= {_key(rollout): "replaced" for rollout in _scored(step.replaced)}
    reasons |= {_key(rollout): "stale" for rollout in _scored(step.dropped)}
    groups = [*step.groups, *step.replaced, *step.dropped]
    return reasons | {_key(unscored.rollout): "unscored" for group in groups for unscored in group.failed}


def _scored(groups: Iterable[ScoredGroup]) -> Iterator[Rollout]:
    return (scored.rollout for group in groups for scored in group.scored)


def _key(rollout: Rollout) -> Key:
    return rollout.group, rollout.index


def _count_recorded(rollout: Rollout) -> int:
    return sum(len(turn.ids) for turn in rollout.turns)


def _agent_count(rollout: Rollout, name: str, default: int) -> int:
    """What an agent's session counted at the engine."""
    agent = rollout.infos.get("agent")
    return int(agent.get(name, default)) if isinstance(agent, dict) else default


def _count_excluded(rollout: Rollout) -> int:
    return sum(
        is_excluded and is_policy
        for ledger in rollout.ledgers
        for is_excluded, is_policy in zip(excluded_tokens(ledger), ledger.mask, strict=True)
    )


def _count_weighted(row: BatchRow) -> int:
    return sum(weight > 0 for weight in row.weights)


def _count_unweighted(row: BatchRow) -> int:
    return sum(is_policy and not weight for is_policy, weight in zip(row.mask, row.weights, strict=True))
