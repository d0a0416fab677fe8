"""What rollouts do, as a simulation draws it: turns, tokens and the seconds of tools, and the limits of a job."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from random import Random
from statistics import fmean, median
from typing import NamedTuple

from gateway.errors import ConfigError
from trainer.ledger import Author, Entry
from trainer.rollout.admission import MAX_WAITING, PATIENCE_S
from trainer.rollout.rollout import Rollout
from trainer.storage.rollout_file import Rollouts
from trainer.storage.run_files import METRICS_FILE, StepMetrics, read_metrics
from trainer.train.run_folder import load_run_settings
from trainer.train.settings import TrainSettings


class TurnScript(NamedTuple):
    """One turn of a rollout."""

    prompt: int
    """Tokens before the turn: the prompt, and all earlier turns and answers."""
    written: int
    """Tokens that the policy writes."""
    answer_s: float
    """Seconds of tools or of an interaction after the turn."""


RolloutScript = tuple[TurnScript, ...]
GroupScripts = tuple[RolloutScript, ...]


@dataclass(frozen=True)
class Workload:
    """Rollouts to draw from: a group of a run, and from it rollouts, so that what the tasks have in common stays."""

    groups: tuple[GroupScripts, ...]
    host_turn_s: float = 0.0
    """Seconds of the process that plays rollouts for each turn."""
    host_rollout_s: float = 0.0
    """The same for each rollout: its session, its prompt, its scoring."""
    signal_share: float = 1.0
    """The share of groups whose rewards differ, so that there is something to learn."""

    def map_turns(self, change: Callable[[TurnScript], TurnScript]) -> Workload:
        """The workload with every turn changed."""
        groups = tuple(tuple(tuple(map(change, script)) for script in group) for group in self.groups)
        return replace(self, groups=groups)

    def with_tool_seconds(self, seconds: float) -> Workload:
        """The workload with tools that take this long: every turn but a rollout's last is followed by an answer."""

        def change(script: RolloutScript) -> RolloutScript:
            answered = tuple(turn._replace(answer_s=seconds) for turn in script[:-1])
            return (*answered, script[-1]._replace(answer_s=0.0))

        return replace(self, groups=tuple(tuple(map(change, group)) for group in self.groups))

    def limit(self, turns: int, turn_tokens: int) -> Workload:
        """The workload with fewer turns and shorter ones; what a run's own limits cut off stays unknown."""
        groups = tuple(tuple(script[:turns] for script in group) for group in self.groups)
        cut = replace(self, groups=groups)
        return cut.map_turns(lambda turn: turn._replace(written=min(turn.written, turn_tokens)))


@dataclass(frozen=True, slots=True)
class JobLimits:
    """The settings of a job that decide what may run at a time."""

    mode: str
    prompts: int
    n: int
    steps: int
    max_staleness: int = 1
    draws: int = 0
    """How often groups without a signal are replaced; 0 without dynamic sampling."""
    open: int = 256
    waiting: int = 1024
    writing: int = 64
    patience_s: float = 1.0
    reads_again: bool = True
    """Whether generations under way read their tokens again under new weights."""

    @classmethod
    def from_settings(cls, settings: TrainSettings) -> JobLimits:
        """The limits of a run file."""
        return cls(
            settings.mode,
            settings.prompts,
            settings.n,
            settings.steps,
            settings.max_staleness,
            settings.algorithm.dynamic_sampling,
            settings.concurrency.inflight_rollouts,
            MAX_WAITING,
            settings.concurrency.running_requests,
            PATIENCE_S,
            not settings.serving.in_place,
        )

    def shrink(self, factor: float) -> JobLimits:
        """The limits of a share of the job."""
        return replace(
            self,
            prompts=max(1, round(self.prompts * factor)),
            open=max(1, round(self.open * factor)),
            waiting=round(self.waiting * factor),
            writing=max(1, round(self.writing * factor)),
        )


MAX_ROLLOUTS = 20_000
"""The newest rollouts of a run that are read."""
HOST_TURN_S = 0.0005
"""Seconds of the process that plays rollouts for each turn: bench/results/rollout.md, on one core."""
DEFAULT_GROUPS = 64
DEFAULT_TURNS = 4
DEFAULT_WRITTEN_SHARE = 0.4
DEFAULT_PROMPT, DEFAULT_ANSWER = 512, 256
DEFAULT_TOOL_S = 1.0


@dataclass(frozen=True)
class MeasuredRun:
    """A finished run: its settings, the metrics of its steps, and its rollouts by group."""

    settings: TrainSettings
    metrics: tuple[StepMetrics, ...]
    groups: tuple[GroupScripts, ...]
    gap_s: float
    """Seconds between a turn's end and what follows, in the process that plays rollouts."""

    @property
    def workload(self) -> Workload:
        """Its rollouts, to draw from."""
        return Workload(self.groups, self.gap_s, 0.0, self.signal_share)

    @property
    def signal_share(self) -> float:
        """The share of rows that had a gradient."""
        rows = sum(step.get("update/rows", 0.0) for step in self.metrics)
        total = rows + sum(step.get("update/idle", 0.0) for step in self.metrics)
        return rows / total if total else 1.0


def read_run(folder: Path, skip: int = 1) -> MeasuredRun:
    """Reads a run, without its first steps, in which caches and allocators are cold; if it has no others, with them."""
    settings = load_run_settings(folder)
    metrics = [step for step in read_metrics(folder / METRICS_FILE) if step["step"] > 0]
    if not metrics:
        remedy = "name a run with at least one step, or leave the run out to plan with stated defaults"
        raise ConfigError("the run has no finished steps", file=folder, remedy=remedy)
    metrics = metrics[skip:] or metrics
    known = {int(step["step"]) for step in metrics}
    groups: dict[tuple[int, str], list[RolloutScript]] = defaultdict(list)
    gaps: list[float] = []
    for rollout in Rollouts(folder)[-MAX_ROLLOUTS:]:
        # The step whose name the group has; in asynchronous mode, the step that used it.
        step = rollout.step if rollout.step is not None else int(rollout.group.partition("-")[0] or 0)
        turns = tuple(_read_turns(rollout))
        if turns and not rollout.stop.is_infrastructure and (step in known or settings.mode == "asynchronous"):
            groups[step, rollout.group].append(turns)
            gaps += (
                max(0.0, after.start_s - before.start_s - before.duration_s)
                for before, after in pairwise(rollout.timeline)
                if before.phase == "generating"
            )
    if not groups:
        remedy = "name a run in which rollouts ended; or leave the run out to plan with stated defaults"
        raise ConfigError("no rollout of the run can be used", file=folder, remedy=remedy)
    return MeasuredRun(
        settings, tuple(metrics), tuple(map(tuple, groups.values())), median(gaps) if gaps else HOST_TURN_S
    )


def _read_turns(rollout: Rollout) -> Iterator[TurnScript]:
    """The turns of a rollout; none if its timeline has other turns than its ledgers."""
    spans = [index for index, span in enumerate(rollout.timeline) if span.phase == "generating"]
    entries = list(_policy_entries(rollout))
    if len(spans) != len(entries):
        return
    for place, (context, entry) in zip(spans, entries, strict=True):
        answer_s = 0.0
        for later in rollout.timeline[place + 1 :]:
            if later.phase in ("generating", "queueing"):
                break
            answer_s += later.duration_s
        yield TurnScript(context, len(entry.ids), answer_s)


def _policy_entries(rollout: Rollout) -> Iterator[tuple[int, Entry]]:
    """The policy's entries, each with the number of tokens before it."""
    for ledger in rollout.ledgers:
        context = 0
        for entry in ledger:
            if entry.author is Author.POLICY:
                yield context, entry
            context += len(entry.ids) + sum(width - 1 for width in entry.widths if width)


def default_workload(settings: TrainSettings, seed: int = 0) -> Workload:
    """Rollouts as nobody has measured them: see `describe_defaults`."""
    random = Random(seed)  # noqa: S311 - draws, no secrets
    return Workload(
        tuple(tuple(_default_script(settings, random) for _ in range(settings.n)) for _ in range(DEFAULT_GROUPS)),
        HOST_TURN_S,
    )


def _default_script(settings: TrainSettings, random: Random) -> RolloutScript:
    limits, context, turns = settings.limits, DEFAULT_PROMPT, []
    count = random.randint(1, max(1, min(limits.assistant_turns, 2 * DEFAULT_TURNS - 1)))
    for turn in range(count):
        mean = DEFAULT_WRITTEN_SHARE * limits.turn_tokens
        written = max(1, min(limits.turn_tokens, round(random.expovariate(1 / mean))))
        answer_s = 0.0 if turn == count - 1 else random.expovariate(1 / DEFAULT_TOOL_S)
        turns.append(TurnScript(context, written, answer_s))
        context += written + DEFAULT_ANSWER
        if context >= limits.rollout_tokens:
            break
    return (*turns[:-1], turns[-1]._replace(answer_s=0.0))


def describe_defaults(settings: TrainSettings) -> str:
    """The assumptions of `default_workload` in words."""
    turns = max(1, min(settings.limits.assistant_turns, 2 * DEFAULT_TURNS - 1))
    written = DEFAULT_WRITTEN_SHARE * settings.limits.turn_tokens
    return (
        f"no run was measured: assumed are 1 to {turns} turns of {written:.0f} tokens on average (exponential), prompts"
        f" of {DEFAULT_PROMPT} and answers of {DEFAULT_ANSWER} tokens, and tools of {DEFAULT_TOOL_S:g} s on average;"
        " name a finished run with --from"
    )


def describe_workload(workload: Workload) -> str:
    """The means of the rollouts that a plan draws from."""
    scripts = [script for group in workload.groups for script in group]
    turns = [turn for script in scripts for turn in script]
    answers = [turn.answer_s for script in scripts for turn in script[:-1]]
    written, tools = fmean(turn.written for turn in turns), fmean(answers) if answers else 0.0
    return (
        f"{len(scripts)} rollouts, {len(turns) / len(scripts):.1f} turns each, {written:.0f} tokens a turn,"
        f" {tools:.3g} s between two turns"
    )
