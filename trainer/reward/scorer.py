"""Rollouts become numbers: each component is asked, what it gives is weighed, and what fails is left out by name."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import anyio

from gateway.errors import ConfigError, ConfigErrors
from trainer.ledger import Author
from trainer.reward.attempt import Attempt
from trainer.reward.component import LARGEST, Component, Places, Unscored
from trainer.reward.scored import Failed, Scored, ScoredGroup
from trainer.reward.settings import RewardSettings
from trainer.reward.shipped import SPREAD
from trainer.run.rollout import Rollout
from trainer.task import Task

log = logging.getLogger(__name__)
SHOWN = 3
"""So many examples of what cannot be scored are shown; the others are counted."""


class Scorer:
    """Several groups may be scored at once. Whatever a function does, the others are scored as if it had not."""

    def __init__(self, settings: RewardSettings, folder: Path | None = None) -> None:
        """Relative paths of functions begin at `folder`. Raises ConfigError for functions that cannot be asked."""
        self.settings = settings
        self._components: dict[str, Component] = {}
        places, errors = Places(), []
        for named, one in settings.components.items():
            try:
                self._components[named] = Component(named, one, folder, places)
            except ConfigError as error:
                errors.append(error)
        if errors:
            raise errors[0] if len(errors) == 1 else ConfigErrors(errors)
        self._told = 0
        self._summed = {author: self._weight_of(author) for author in SPREAD.values()}

    async def score(self, task: Task, rollouts: Sequence[Rollout]) -> ScoredGroup:
        """The component that tells success is asked first, and the others only of what it could score."""
        tries = [_Try(Attempt(task, rollout)) for rollout in rollouts]
        for one in tries:
            if one.attempt.stop.infrastructure:
                one.fail(f"rollout {one.attempt.rollout.name} ended with {one.attempt.stop}")
        telling = self.settings.telling
        await self._ask(telling, _left(tries))
        left = _left(tries)
        for one in left:
            one.attempt = replace(one.attempt, success=self._succeeded(one.given))
        async with anyio.create_task_group() as asking:
            for other in self._components:
                if other != telling:
                    asking.start_soon(self._ask, other, left)
        scored = tuple(made for one in _left(tries) if (made := self._scored(one)) is not None)
        failed = tuple(Failed(one.attempt.rollout, one.reason) for one in tries if one.reason)
        for failure in failed:
            self._told += 1
            log.log(logging.WARNING if self._told <= SHOWN else logging.INFO, "not scored: %s", failure.reason)
        return ScoredGroup(task, scored, failed)

    def recalled(self, task: Task, rollouts: Sequence[Rollout]) -> ScoredGroup:
        """Of rollouts that were scored before, by what they are known to have been given; no function is asked.

        One without all of its components was not scored, and is left out.
        """
        known = [one for one in rollouts if self._components.keys() <= one.rewards.keys()]
        tries = [_Try(Attempt(task, one, self._succeeded(one.rewards)), dict(one.rewards)) for one in known]
        return ScoredGroup(task, tuple(made for one in tries if (made := self._scored(one)) is not None))

    def _succeeded(self, given: Mapping[str, float]) -> bool:
        return given[self.settings.telling] >= self.settings.success_at

    async def _ask(self, named: str, tries: Sequence[_Try]) -> None:
        if not tries:
            return
        values = await self._components[named].ask([one.attempt for one in tries])
        for one, value in zip(tries, values, strict=True):
            if isinstance(value, Unscored):
                one.fail(str(value))
            else:
                one.given[named] = value

    def _scored(self, one: _Try) -> Scored | None:
        """None where the numbers together are none that can be learned from."""
        attempt, components = one.attempt, {named: one.given[named] for named in self._components}
        weights = {named: settings.weight for named, settings in self.settings.components.items()}
        reward = sum(weights[named] * value for named, value in components.items())
        given = {author: attempt.given(author) for author in self._summed}
        turns = tuple(
            sum((1.0 if weight is None else weight) * given[author][turn] for author, weight in self._summed.items())
            for turn in range(len(attempt.turns))
        )
        for what, number in [("the weighted sum", reward), *(("the score of a turn", score) for score in turns)]:
            if not abs(number) <= LARGEST:
                one.fail(f"{what} is {number:g}, from which nothing can be learned; rollout {attempt.rollout.name}")
                return None
        spread = sum((weight or 0.0) * score for author, weight in self._summed.items() for score in given[author])
        rollout = replace(attempt.rollout, rewards=components, weighed=reward)
        return Scored(rollout, components, reward, turns, bool(attempt.success), spread)

    def _weight_of(self, author: Author) -> float | None:
        """What an author's scores of turns count in the reward; None where no component sums them."""
        weights = [one.weight for one in self.settings.components.values() if SPREAD.get(one.function) is author]
        return sum(weights) if weights else None


@dataclass
class _Try:
    """What the components say of one attempt, as far as they were asked."""

    attempt: Attempt
    given: dict[str, float] = field(default_factory=dict)
    reason: str = ""

    def fail(self, reason: str) -> None:
        """The first reason stays."""
        self.reason = self.reason or reason


def _left(tries: Sequence[_Try]) -> list[_Try]:
    """Those that have not failed."""
    return [one for one in tries if not one.reason]
