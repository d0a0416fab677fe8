"""Scores rollouts: calls the reward components, sums their weighted scores, and reports what could not be scored."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import fsum, sqrt
from pathlib import Path
from typing import TYPE_CHECKING

import anyio

from gateway.errors import ConfigError, ConfigErrors
from trainer.ledger import Author
from trainer.reward.attempt import Attempt
from trainer.reward.component import MAX_REWARD, Component, RewardFn, ScoringError, SharedLimits
from trainer.reward.functions import TURN_SCORE_AUTHORS
from trainer.reward.settings import RewardSettings
from trainer.rollout.rollout import Rollout
from trainer.rollout.task import Task

if TYPE_CHECKING:
    from trainer.template import Template


@dataclass(frozen=True, slots=True)
class ScoredRollout:
    """A rollout with its reward and the scores of its turns."""

    rollout: Rollout
    """Its `rewards` are the components."""
    components: Mapping[str, float]
    """The unweighted scores by component, in the order of the settings."""
    reward: float
    """The weighted sum of the components, which the algorithm sees."""
    turn_scores: tuple[float, ...]
    """What tools and feedback scored each of the policy's turns, over all ledgers.

    Scores of tools are weighted like the component whose function is `tools`, those of feedback like the one whose
    function is `feedback` or `outcome`; if no component sums them, they count in full.
    """
    success: bool
    """Whether the component that decides success reached its threshold."""
    reward_from_turns: float = 0.0
    """The part of the reward that sums turn scores. `reward - reward_from_turns` is what came at the end only, so that
    together with `turn_scores` nothing is counted twice."""


@dataclass(frozen=True, slots=True)
class UnscoredRollout:
    """A rollout that could not be scored. That is not the policy's fault, so it is not a reward of 0."""

    rollout: Rollout
    reason: str
    """For the operator: component, function, rollout, and what went wrong."""


@dataclass(frozen=True, slots=True)
class ScoredGroup:
    """The rollouts of one task that are compared with each other, in order."""

    task: Task
    scored: tuple[ScoredRollout, ...]
    failed: tuple[UnscoredRollout, ...] = ()
    seconds: Mapping[str, float] = field(default_factory=dict, compare=False)
    """How long each component took to score the group."""


def compute_reward_metrics(groups: Iterable[ScoredGroup]) -> dict[str, float]:
    """Means over all scored rollouts, with components unweighted. If there are none, only the failures are counted."""
    groups = tuple(groups)
    rollouts = [scored for group in groups for scored in group.scored]
    metrics = {"reward/failed": float(sum(len(group.failed) for group in groups))}
    if not rollouts:
        return metrics
    mean = _mean(scored.reward for scored in rollouts)
    metrics |= {"reward/mean": mean, "reward/std": sqrt(_mean((scored.reward - mean) ** 2 for scored in rollouts))}
    metrics |= {
        f"reward/{name}": _mean(scored.components[name] for scored in rollouts) for name in rollouts[0].components
    }
    return metrics | {"success/sampled": _mean(float(scored.success) for scored in rollouts)}


def compute_reward_times(groups: Iterable[ScoredGroup]) -> dict[str, float]:
    """The mean and the longest time that each component took to score a group."""
    seconds: dict[str, list[float]] = {}
    for group in groups:
        for name, spent in group.seconds.items():
            seconds.setdefault(name, []).append(spent)
    return {
        f"time/rewards/{name}/{statistic}_s": value
        for name, spent in seconds.items()
        for statistic, value in (("mean", _mean(spent)), ("max", max(spent)))
    }


def _mean(values: Iterable[float]) -> float:
    """The exact mean, independent of the order."""
    values = tuple(values)
    return fsum(values) / len(values)


@dataclass(frozen=True)
class GivenRewards:
    """Reward functions that are given as Python objects, not by name."""

    functions: Mapping[str, RewardFn] = field(default_factory=dict)
    """By the name that the settings have as `function`."""
    on_scored: Callable[[Sequence[Rollout]], None] = lambda _: None
    """Called with the rollouts of a group when they are scored."""
    take_metrics: Callable[[], dict[str, float]] = dict
    """Returns what the functions measured since the last call."""


log = logging.getLogger(__name__)
MAX_WARNINGS = 3
"""How many failures are logged as warnings, each with another reason; others are logged as info."""


class Scorer:
    """Scores groups, several at once. An error of a reward function costs only the rollouts that it was called for."""

    def __init__(
        self,
        settings: RewardSettings,
        folder: Path | None = None,
        decoder: Template | None = None,
        given: GivenRewards | None = None,
    ) -> None:
        """Relative paths of functions start at `folder`. Raises ConfigError for functions that cannot be called."""
        self.settings, self.given = settings, given or GivenRewards()
        self.decoder = decoder
        """The run's template, which decodes what the policy wrote; may be set after the functions are loaded."""
        self._components: dict[str, Component] = {}
        limits, errors = SharedLimits(), []
        for name, component in settings.components.items():
            try:
                function = self.given.functions.get(component.function)
                self._components[name] = Component(name, component, folder, limits, function)
            except ConfigError as error:
                errors.append(error)
        if errors:
            raise errors[0] if len(errors) == 1 else ConfigErrors(errors)
        self._warned: set[str] = set()
        """The reasons that were logged as warnings."""
        self._turn_weights = {author: self._turn_weight(author) for author in TURN_SCORE_AUTHORS.values()}

    @property
    def truth_readers(self) -> list[str]:
        """The components whose functions, of the user's own, read the right answer."""
        return [name for name, component in self._components.items() if component.reads_truth]

    async def score(self, task: Task, rollouts: Sequence[Rollout], *, log_failures: bool = True) -> ScoredGroup:
        """Scores a group. The component that decides success comes first; the others score what it could score."""
        pending = [_PendingScore(Attempt(task, rollout, decoder=self.decoder)) for rollout in rollouts]
        for score in pending:
            if score.attempt.stop.is_infrastructure:
                score.fail(f"rollout {score.attempt.rollout.name} ended with {score.attempt.stop}")
        success_component = self.settings.success_component
        seconds: dict[str, float] = {}
        await self._run_component(success_component, _not_failed(pending), seconds)
        left = _not_failed(pending)
        for score in left:
            score.attempt = replace(score.attempt, success=self._is_success(score.components))
        async with anyio.create_task_group() as tasks:
            for name in self._components:
                if name != success_component:
                    tasks.start_soon(self._run_component, name, left, seconds)
        scored = tuple(result for score in _not_failed(pending) if (result := self._combine(score)) is not None)
        failed = tuple(UnscoredRollout(score.attempt.rollout, score.reason) for score in pending if score.reason)
        self.given.on_scored(rollouts)
        for failure in failed if log_failures else ():
            reason = failure.reason.partition("; rollout")[0]
            is_new = reason not in self._warned and len(self._warned) < MAX_WARNINGS
            self._warned.update([reason] if is_new else ())
            log.log(logging.WARNING if is_new else logging.INFO, "not scored: %s", failure.reason)
        return ScoredGroup(task, scored, failed, seconds)

    def score_recorded(self, task: Task, rollouts: Sequence[Rollout]) -> ScoredGroup:
        """Scores rollouts by their recorded components, without calling a function.

        Rollouts that lack a component were not scored, and are left out.
        """
        recorded = [rollout for rollout in rollouts if self._components.keys() <= rollout.rewards.keys()]
        pending = [
            _PendingScore(Attempt(task, rollout, self._is_success(rollout.rewards)), dict(rollout.rewards))
            for rollout in recorded
        ]
        return ScoredGroup(task, tuple(result for score in pending if (result := self._combine(score)) is not None))

    def _is_success(self, components: Mapping[str, float]) -> bool:
        return components[self.settings.success_component] >= self.settings.success_at

    async def _run_component(self, name: str, pending: Sequence[_PendingScore], seconds: dict[str, float]) -> None:
        """Scores the attempts by one component, and adds to `seconds` how long that took."""
        if not pending:
            return
        began = time.monotonic()
        values = await self._components[name].score([score.attempt for score in pending])
        seconds[name] = time.monotonic() - began
        for score, value in zip(pending, values, strict=True):
            if isinstance(value, ScoringError):
                score.fail(str(value))
            else:
                score.components[name] = value

    def _combine(self, score: _PendingScore) -> ScoredRollout | None:
        """Sums the components; None if the sum or a turn's score is not a usable number."""
        attempt, components = score.attempt, {name: score.components[name] for name in self._components}
        weights = {name: component.weight for name, component in self.settings.components.items()}
        reward = sum(weights[name] * value for name, value in components.items())
        by_author = {author: attempt.given(author) for author in self._turn_weights}
        turn_scores = tuple(
            sum(
                (1.0 if weight is None else weight) * by_author[author][turn]
                for author, weight in self._turn_weights.items()
            )
            for turn in range(len(attempt.turns))
        )
        numbers = [("the weighted sum", reward), *(("the score of a turn", turn_score) for turn_score in turn_scores)]
        for what, number in numbers:
            if not abs(number) <= MAX_REWARD:
                score.fail(f"{what} is {number:g}, which is not a usable number; rollout {attempt.rollout.name}")
                return None
        from_turns = sum(
            (weight or 0.0) * turn_score
            for author, weight in self._turn_weights.items()
            for turn_score in by_author[author]
        )
        rollout = replace(attempt.rollout, rewards=components, weighted_reward=reward)
        return ScoredRollout(rollout, components, reward, turn_scores, bool(attempt.success), from_turns)

    def _turn_weight(self, author: Author) -> float | None:
        """The weight of an author's turn scores in the reward; None if no component sums them."""
        components = self.settings.components.values()
        weights = [component.weight for component in components if TURN_SCORE_AUTHORS.get(component.function) is author]
        return sum(weights) if weights else None


@dataclass
class _PendingScore:
    """An attempt with the component scores that it has so far."""

    attempt: Attempt
    components: dict[str, float] = field(default_factory=dict)
    reason: str = ""

    def fail(self, reason: str) -> None:
        """Keeps the first reason."""
        self.reason = self.reason or reason


def _not_failed(pending: Sequence[_PendingScore]) -> list[_PendingScore]:
    return [score for score in pending if not score.reason]
