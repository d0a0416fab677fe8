"""Collects the scored rollouts of a training step: scored as groups finish, trained in the order of their start."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import anyio

from gateway.types import EMPTY
from trainer.algorithms.packing import BatchRow
from trainer.algorithms.token_weights import excluded_tokens
from trainer.algorithms.train_batch import count_policy_tokens, has_learning_signal
from trainer.data.curriculum import TaskDraw, TaskStream
from trainer.reward.scorer import ScoredGroup, Scorer
from trainer.rollout.admission import Admission
from trainer.rollout.loop import RolloutRunner
from trainer.rollout.rollout import COUNTS_INFO, Rollout, StopReason
from trainer.rollout.scheduler import Group, Scheduler
from trainer.rollout.steppers import find_failed_tools
from trainer.rollout.task import Task
from trainer.train.settings import TrainSettings

TRUNCATED = frozenset({StopReason.LENGTH_TURN, StopReason.LENGTH_ROLLOUT})


@dataclass
class StepRollouts:
    """The rollouts of a step; filled while they finish."""

    groups: list[ScoredGroup] = field(default_factory=list)
    """Groups to train on, in the order of their start."""
    replaced: list[ScoredGroup] = field(default_factory=list)
    """Groups without a learning signal, which were replaced by others."""
    dropped: list[ScoredGroup] = field(default_factory=list)
    """Groups that were too stale when they were finished."""
    finished: list[Rollout] = field(default_factory=list)
    """Every rollout as it ended."""
    draws: list[TaskDraw] = field(default_factory=list)
    """The tasks of all of these."""
    step: int | None = None
    """The step that trains on them, if the names of the groups do not say so."""
    waited_s: float = 0.0
    """Seconds since the previous step in which no rollout ran although training was busy."""

    @property
    def scored(self) -> list[ScoredGroup]:
        """All groups for metrics: groups without a signal are not trained on, but tell as much about the policy."""
        return [*self.replaced, *self.groups]

    @property
    def rollouts(self) -> list[Rollout]:
        """All rollouts to be saved, with their scores if they have any, in a deterministic order."""
        scored = (
            _rollouts_by_key(self.replaced, None)
            | _rollouts_by_key(self.dropped, None)
            | _rollouts_by_key(self.groups, self.step)
        )
        rollouts = [
            rollout
            if rollout.stop.is_infrastructure
            else scored.get((rollout.group, rollout.index), replace(rollout, rewards=EMPTY))
            for rollout in self.finished
        ]
        return sorted(rollouts, key=lambda rollout: (*group_order(rollout.group), rollout.index))

    @property
    def lost_reasons(self) -> Counter[str]:
        """Why rollouts were lost to infrastructure or could not be scored, with the number for each reason."""
        reasons = Counter(
            f"{rollout.stop}: {rollout.reason}" for rollout in self.finished if rollout.stop.is_infrastructure
        )
        failed = [unscored for group in self.scored for unscored in group.failed]
        reasons.update(unscored.reason.partition("; rollout")[0] for unscored in failed)  # Without the rollout's name.
        return reasons

    def metrics(self, version: int) -> dict[str, float]:
        """Metrics of the rollouts; `version` is the policy's newest."""
        rollouts = [scored.rollout for group in self.scored for scored in group.scored]
        metrics = {"rollout/count": float(len(rollouts)), "rollout/lost": float(sum(self.lost_reasons.values()))}
        lost = Counter(rollout.stop for rollout in self.finished if rollout.stop.is_infrastructure)
        metrics |= {f"lost/{stop}": float(count) for stop, count in sorted(lost.items())}
        by_tool = Counter(tool for rollout in self.finished for tool in find_failed_tools(rollout))
        metrics |= {f"rollout/lost_to/{tool}": float(count) for tool, count in sorted(by_tool.items())}
        counts = [rollout.infos[COUNTS_INFO] for rollout in self.finished if COUNTS_INFO in rollout.infos]
        if counts:  # Of graded rollouts.
            metrics["grade/planted"] = sum(value for each in counts for value in each.values())
        cut = Counter(scored.rollout.kind for group in (*self.replaced, *self.dropped) for scored in group.scored)
        metrics |= {f"rollout/cut/{kind or 'task'}": float(count) for kind, count in sorted(cut.items())}
        if not rollouts:
            return metrics
        metrics |= {
            "rollout/turns": _mean(len(rollout.turns) for rollout in rollouts),
            "rollout/tokens": _mean(sum(map(len, rollout.ledgers)) for rollout in rollouts),
            "rollout/written": _mean(map(count_policy_tokens, rollouts)),
            "rollout/calls": _mean(sum(len(turn.calls) for turn in rollout.turns) for rollout in rollouts),
            "rollout/truncated": _mean(rollout.stop in TRUNCATED for rollout in rollouts),
        }
        logprobs = [logprob for rollout in rollouts for turn in rollout.turns for logprob in turn.logprobs or ()]
        if logprobs:
            metrics["rollout/logprob"] = _mean(iter(logprobs))
        ages = count_token_ages(rollouts, version)
        if ages:
            metrics["rollout/staleness"] = sum(age * count for age, count in ages.items()) / ages.total()
        stops = Counter(rollout.stop for rollout in rollouts)
        return metrics | {f"stops/{stop}": count / len(rollouts) for stop, count in sorted(stops.items())}

    def staleness_metrics(self, version: int) -> dict[str, float]:
        """The age of the trained tokens in versions, and the number of groups that were dropped as too stale."""
        ages = count_token_ages((scored.rollout for group in self.groups for scored in group.scored), version)
        metrics = {"staleness/max": float(max(ages, default=0)), "staleness/dropped": float(len(self.dropped))}
        metrics |= {f"staleness/age_{age}": tokens / ages.total() for age, tokens in sorted(ages.items())}
        return metrics | {"engine/waiting_s": self.waited_s}


def _rollouts_by_key(groups: Sequence[ScoredGroup], step: int | None) -> dict[tuple[str, int], Rollout]:
    """Rollouts by group and index, marked with the step if one is given."""
    rollouts = (scored.rollout for group in groups for scored in group.scored)
    return {
        (rollout.group, rollout.index): rollout if step is None else replace(rollout, step=step) for rollout in rollouts
    }


def count_token_ages(rollouts: Iterable[Rollout], version: int) -> Counter[int]:
    """Counts the policy's tokens by their age in versions."""
    ages: Counter[int] = Counter()
    for rollout in rollouts:
        for turn in rollout.turns:
            earlier = sum(count for _, count in turn.earlier_versions)
            for sampled_by, count in (*turn.earlier_versions, (turn.version, len(turn.ids) - earlier)):
                if sampled_by is not None and count:
                    ages[version - sampled_by] += count
    return ages


def _mean(values: Iterator[float]) -> float:
    known = list(values)
    return sum(known) / len(known)


def group_order(group: str) -> tuple[int, ...]:
    """The numbers in a group's name, for sorting: `step-draw-number`, or `0-version-number` in asynchronous mode."""
    return tuple(int(part) for part in group.split("-"))


@dataclass(frozen=True, slots=True)
class StepCollector:
    """Generates and scores the groups of steps."""

    runner: RolloutRunner
    scorer: Scorer
    settings: TrainSettings
    on_extra: Callable[[int], None]
    """Called with the number of rollouts that replace groups without a signal."""

    async def collect(self, step: int, task_stream: TaskStream, into: StepRollouts) -> None:
        """Collects a step's groups. With dynamic sampling, replaces groups without a signal, up to `draws` times."""
        settings, missing = self.settings, self.settings.prompts
        draws = settings.algorithm.dynamic_sampling
        for draw in range(draws + 1):
            drawn = [task_stream.draw() for _ in range(missing)]
            into.draws += drawn
            await self._run_groups(f"{step}-{draw}-", [task_draw.task for task_draw in drawn], into)
            if draw == draws:
                return
            into.replaced += [group for group in into.groups if not has_learning_signal(group, settings.algorithm)]
            into.groups = [group for group in into.groups if has_learning_signal(group, settings.algorithm)]
            missing = settings.prompts - len(into.groups)
            if not missing:
                return
            self.on_extra(missing * settings.n)

    def make_scheduler(self, sink: Callable[[Rollout], Awaitable[None]]) -> Scheduler:
        """What runs the groups of tasks; `sink` gets every rollout as it ends."""
        settings, admission = self.settings, Admission(self.settings.concurrency)
        return Scheduler(self.runner, settings.n, admission=admission, max_retries=settings.max_retries, sink=sink)

    async def _run_groups(self, prefix: str, tasks: Sequence[Task], into: StepRollouts) -> None:
        """Runs a group for each task; groups are scored while others are still running."""
        earlier = list(into.groups)
        scored: dict[tuple[int, ...], ScoredGroup] = {}

        async def score(group: Group) -> None:
            scored[group_order(group.rollouts[0].group)] = await self.scorer.score(group.task, group.rollouts)
            into.groups = earlier + [scored[key] for key in sorted(scored)]

        async def keep(rollout: Rollout) -> None:
            into.finished.append(rollout)

        scheduler = self.make_scheduler(keep)
        async with scheduler.submit(tasks, name=prefix) as groups, anyio.create_task_group() as scoring:
            async for group in groups:
                if group.rollouts:
                    scoring.start_soon(score, group)


Key = tuple[str, int]
"""A rollout's group and index."""


@dataclass(frozen=True, slots=True)
class TokenAccount:
    """What became of the tokens that were sampled for a step."""

    sampled: int
    trained: int
    left_out: Counter[str]
    """By reason."""

    def check(self) -> None:
        """Raises AssertionError unless sampled = trained + left out."""
        if self.sampled != self.trained + self.left_out.total():
            reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(self.left_out.items())) or "none"
            raise AssertionError(
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
    batch. Raises AssertionError if they do not agree.
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
            left_out[reason] += count_policy_tokens(rollout)
    excluded = sum(_count_excluded(rollout) for rollout in _scored(step.groups))
    trained_ids = {id(row) for row in trained_rows}
    left_out["excluded"] += excluded
    left_out["credit_rounds"] += sum(map(_count_unweighted, rows)) - excluded
    left_out["no_gradient"] += sum(_count_weighted(row) for row in rows if id(row) not in trained_ids)
    sampled = sum(_agent_count(rollout, "sampled", count_policy_tokens(rollout)) for rollout in step.finished)
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
