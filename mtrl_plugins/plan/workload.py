"""What rollouts do, as a simulation draws it: turns, tokens and the seconds of tools, and the limits of a job."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

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
        admission = settings.admission
        return cls(
            settings.mode,
            settings.prompts,
            settings.n,
            settings.steps,
            settings.max_staleness,
            settings.draws if settings.algorithm.dynamic else 0,
            admission.open,
            admission.waiting,
            admission.writing,
            admission.patience_s,
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
