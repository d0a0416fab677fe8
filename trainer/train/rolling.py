"""A step's rollouts, scored: groups come as they are done, and are learned from in the order in which they began."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import anyio

from trainer.data.curriculum import Course, Draw
from trainer.groups import Group, Groups
from trainer.learn.lesson import teaches
from trainer.ledger import NOTHING
from trainer.play import Player
from trainer.reward.scored import ScoredGroup
from trainer.reward.scorer import Scorer
from trainer.run.rollout import Rollout, StopReason
from trainer.task import Task
from trainer.train.settings import TrainSettings

TRUNCATED = frozenset({StopReason.LENGTH_TURN, StopReason.LENGTH_ROLLOUT})


@dataclass
class Rolled:
    """What a step's rolling out came to; at any moment it holds what is done so far."""

    groups: list[ScoredGroup] = field(default_factory=list)
    """Those that are learned from, in the order in which they began."""
    left: list[ScoredGroup] = field(default_factory=list)
    """Those that taught nothing, and were replaced by others."""
    dropped: list[ScoredGroup] = field(default_factory=list)
    """Those that were too stale when a step could have had them."""
    over: list[Rollout] = field(default_factory=list)
    """Every rollout, as it ended."""
    draws: list[Draw] = field(default_factory=list)
    """The tasks of all of these."""
    step: int | None = None
    """The step that learns from them, where the names of groups do not tell."""
    waited_s: float = 0.0
    """Since the step before, how long nothing was under way though the trainer was at work."""

    @property
    def scored(self) -> list[ScoredGroup]:
        """All that were scored. What taught nothing is no part of a step, but it tells as much of the policy."""
        return [*self.left, *self.groups]

    @property
    def rollouts(self) -> list[Rollout]:
        """All that is kept, with their scores where they have any, in an order that no clock decides."""
        scored = _named(self.left, None) | _named(self.dropped, None) | _named(self.groups, self.step)
        kept = [
            one if one.stop.infrastructure else scored.get((one.group, one.index), replace(one, rewards=NOTHING))
            for one in self.over
        ]
        return sorted(kept, key=lambda one: (*place(one.group), one.index))

    @property
    def reasons(self) -> Counter[str]:
        """Of what does not count, and is not the policy's doing."""
        reasons = Counter(f"{one.stop}: {one.reason}" for one in self.over if one.stop.infrastructure)
        failed = [one for group in self.scored for one in group.failed]
        reasons.update(one.reason.partition("; rollout")[0] for one in failed)  # What befell many is one reason.
        return reasons

    def metrics(self, version: int) -> dict[str, float]:
        """`version` is the policy's newest."""
        rollouts = [one.rollout for group in self.scored for one in group.scored]
        told = {"rollout/count": float(len(rollouts)), "rollout/lost": float(sum(self.reasons.values()))}
        broken = Counter(one.stop for one in self.over if one.stop.infrastructure)
        told |= {f"lost/{stop}": float(count) for stop, count in sorted(broken.items())}
        if not rollouts:
            return told
        told |= {
            "rollout/turns": _mean(len(rollout.turns) for rollout in rollouts),
            "rollout/tokens": _mean(sum(map(len, rollout.ledgers)) for rollout in rollouts),
            "rollout/written": _mean(sum(len(turn.ids) for turn in rollout.turns) for rollout in rollouts),
            "rollout/calls": _mean(sum(len(turn.calls) for turn in rollout.turns) for rollout in rollouts),
            "rollout/truncated": _mean(rollout.stop in TRUNCATED for rollout in rollouts),
        }
        ages = ages_of(rollouts, version)
        told |= {"rollout/staleness": sum(age * count for age, count in ages.items()) / ages.total()} if ages else {}
        stops = Counter(rollout.stop for rollout in rollouts)
        return told | {f"stops/{stop}": count / len(rollouts) for stop, count in sorted(stops.items())}

    def staleness(self, version: int) -> dict[str, float]:
        """Of what is learned from, and of what could not be any more."""
        ages = ages_of((one.rollout for group in self.groups for one in group.scored), version)
        told = {"staleness/max": float(max(ages, default=0)), "staleness/dropped": float(len(self.dropped))}
        told |= {f"staleness/age_{age}": tokens / ages.total() for age, tokens in sorted(ages.items())}
        return told | {"engine/waiting_s": self.waited_s}


def _named(groups: Sequence[ScoredGroup], step: int | None) -> dict[tuple[str, int], Rollout]:
    """Rollouts by group and index, with the step where one is to be told."""
    rollouts = (one.rollout for group in groups for one in group.scored)
    return {(one.group, one.index): one if step is None else replace(one, step=step) for one in rollouts}


def ages_of(rollouts: Iterable[Rollout], version: int) -> Counter[int]:
    """Of what the policy wrote, how many tokens are so many versions old."""
    ages: Counter[int] = Counter()
    for rollout in rollouts:
        for turn in rollout.turns:
            earlier = sum(count for _, count in turn.before)
            for sampled, count in (*turn.before, (turn.version, len(turn.ids) - earlier)):
                if sampled is not None and count:
                    ages[version - sampled] += count
    return ages


def _mean(values: Iterator[float]) -> float:
    known = list(values)
    return sum(known) / len(known)


def place(group: str) -> tuple[int, ...]:
    """Of a group's name, numbers, so that the tenth comes after the ninth: `step-draw-number`, or `0-version-number` of
    one that was begun for no step of its own."""
    return tuple(int(part) for part in group.split("-"))


@dataclass(frozen=True, slots=True)
class Roller:
    """Rolls out and scores steps."""

    player: Player
    scorer: Scorer
    settings: TrainSettings
    more: Callable[[int], None]
    """Told how many rollouts are made beyond those that were to be expected."""

    async def step(self, step: int, course: Course, into: Rolled) -> None:
        """Where `dynamic` is set, groups that teach nothing are replaced, a few times over."""
        settings, missing = self.settings, self.settings.prompts
        draws = settings.draws if settings.algorithm.dynamic else 0
        for draw in range(draws + 1):
            drawn = [course.draw() for _ in range(missing)]
            into.draws += drawn
            await self._play(f"{step}-{draw}-", [one.task for one in drawn], into)
            if draw == draws:
                return
            into.left += [group for group in into.groups if not teaches(group, settings.algorithm)]
            into.groups = [group for group in into.groups if teaches(group, settings.algorithm)]
            missing = settings.prompts - len(into.groups)
            if not missing:
                return
            self.more(missing * settings.n)

    async def _play(self, name: str, tasks: Sequence[Task], into: Rolled) -> None:
        """Scoring one group does not wait for the next."""
        known = list(into.groups)
        done: dict[tuple[int, ...], ScoredGroup] = {}

        async def score(group: Group) -> None:
            done[place(group.rollouts[0].group)] = await self.scorer.score(group.task, group.rollouts)
            into.groups = known + [done[key] for key in sorted(done)]

        async def keep(rollout: Rollout) -> None:
            into.over.append(rollout)

        settings = self.settings
        groups = Groups(self.player, settings.n, admission=settings.admission, rules=settings.groups, keep=keep)
        async with groups.play(tasks, name=name) as playing, anyio.create_task_group() as scoring:
            async for group in playing:
                if group.rollouts:
                    scoring.start_soon(score, group)
