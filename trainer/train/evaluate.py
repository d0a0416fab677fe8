"""Whether a policy can do it is asked on tasks that it was not trained on, sampled and by its likeliest tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import sqrt

import anyio

from trainer.config import Admission
from trainer.groups import Group, Groups
from trainer.play import Player
from trainer.reward.scored import ScoredGroup
from trainer.reward.scorer import Scorer
from trainer.task import Task

NAME = "e-"
"""Before the number of a group, so that its rollouts are not those of a step."""
SURE = 1.96
"""Of a normal distribution, so many deviations to either side hold 95 %."""


@dataclass(frozen=True, slots=True)
class Rate:
    """How often it went well."""

    right: int
    tried: int

    @property
    def value(self) -> float:
        return self.right / self.tried if self.tried else 0.0

    @property
    def interval(self) -> tuple[float, float]:
        """Wilson's, 95 %: it stays within 0 and 1, and says something of 0 out of 50 as well."""
        if not self.tried:
            return 0.0, 1.0
        square, tried = SURE**2, self.tried
        middle = (self.value + square / (2 * tried)) / (1 + square / tried)
        half = SURE / (1 + square / tried) * sqrt(self.value * (1 - self.value) / tried + square / (4 * tried**2))
        return max(0.0, middle - half), min(1.0, middle + half)


@dataclass(frozen=True, slots=True)
class Evaluation:
    all: Rate
    kinds: Mapping[str, Rate]
    lost: int
    """Rollouts that could not be scored, and count neither way."""
    groups: tuple[ScoredGroup, ...] = ()

    @classmethod
    def of(cls, groups: Sequence[ScoredGroup], lost: int, column: str) -> Evaluation:
        right: dict[str, int] = {}
        tried: dict[str, int] = {}
        for group in groups:
            kind = group.task.kind(column)
            tried[kind] = tried.get(kind, 0) + len(group.scored)
            right[kind] = right.get(kind, 0) + sum(one.success for one in group.scored)
        kinds = {kind: Rate(right[kind], tried[kind]) for kind in sorted(tried)}
        whole = Rate(sum(right.values()), sum(tried.values()))
        return cls(whole, kinds, lost, tuple(groups))

    def by_kind(self, name: str) -> dict[str, float]:
        """As metrics, where there is more than one kind."""
        return {f"{name}/{kind}": rate.value for kind, rate in self.kinds.items()} if len(self.kinds) > 1 else {}


async def evaluate(
    player: Player, scorer: Scorer, tasks: Sequence[Task], admission: Admission, column: str
) -> Evaluation:
    """Each task once. `column` tells their kinds apart."""
    done: dict[int, ScoredGroup] = {}
    lost = 0

    async def score(group: Group) -> None:
        done[int(group.rollouts[0].group.removeprefix(NAME))] = await scorer.score(group.task, group.rollouts)

    groups = Groups(player, 1, admission=admission)
    async with groups.play(tasks, name=NAME) as playing, anyio.create_task_group() as scoring:
        async for group in playing:
            lost += not group.rollouts
            if group.rollouts:
                scoring.start_soon(score, group)
    ordered = [done[place] for place in sorted(done)]
    return Evaluation.of(ordered, lost + sum(len(group.failed) for group in ordered), column)
