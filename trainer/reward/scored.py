"""What scoring leaves: a number for each rollout, or the reason why it has none."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import fsum, sqrt

from trainer.run.rollout import Rollout
from trainer.task import Task


@dataclass(frozen=True, slots=True)
class Scored:
    rollout: Rollout
    """Its `rewards` are the components."""
    components: Mapping[str, float]
    """By name, in the settings' order, as the functions gave them: unweighted."""
    reward: float
    """The weighted sum: what the algorithm sees."""
    turns: tuple[float, ...]
    """Of each of the policy's turns, over all ledgers and earlier ones first, what tools and feedback scored it.

    Tools' scores are weighted as the component whose function is `tools`, feedback's as the one whose function is
    `feedback` or `outcome`; scores of a kind that no component sums count in full.
    """
    success: bool
    """Whether the component that tells success reached its mark."""
    spread: float = 0.0
    """The sum of those `turns` that components sum: `reward - spread` is what came at the end alone, so that it and
    these turns together are the reward once, and not twice."""


@dataclass(frozen=True, slots=True)
class Failed:
    """A rollout that could not be scored. The policy is not to blame, so that this is no reward of 0."""

    rollout: Rollout
    reason: str
    """For the operator: component, function, rollout, and what came in place of a number."""


@dataclass(frozen=True, slots=True)
class ScoredGroup:
    """The attempts at one task that are compared with each other, in their order."""

    task: Task
    scored: tuple[Scored, ...]
    failed: tuple[Failed, ...] = ()


def metrics(groups: Iterable[ScoredGroup]) -> dict[str, float]:
    """Over all rollouts alike, unweighted by component. Where none was scored, only that is told."""
    groups = tuple(groups)
    scored = [one for group in groups for one in group.scored]
    told = {"reward/failed": float(sum(len(group.failed) for group in groups))}
    if not scored:
        return told
    mean = _mean(one.reward for one in scored)
    told |= {"reward/mean": mean, "reward/std": sqrt(_mean((one.reward - mean) ** 2 for one in scored))}
    told |= {f"reward/{name}": _mean(one.components[name] for one in scored) for name in scored[0].components}
    return told | {"success/sampled": _mean(float(one.success) for one in scored)}


def _mean(values: Iterable[float]) -> float:
    """The same to the last bit, whatever the order."""
    values = tuple(values)
    return fsum(values) / len(values)
