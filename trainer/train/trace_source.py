"""Where the steps of SFT take their rollouts from: traces, played when they are drawn."""

from __future__ import annotations

from types import TracebackType
from typing import Self, cast

from gateway.types import EMPTY
from trainer.data.curriculum import TaskStream
from trainer.data.traces import TraceTask
from trainer.reward.scorer import ScoredGroup, ScoredRollout
from trainer.rollout.rollout import Rollout
from trainer.rollout.trace_player import play_trace
from trainer.train.collect import StepCollector, StepRollouts


class TraceSource:
    """Plays the traces of a step; each counts as a success, whose reward is 1."""

    phase = "rolling_out"

    def __init__(self, collector: StepCollector, task_stream: TaskStream) -> None:
        self._collector, self._task_stream = collector, task_stream
        self.pending: list[StepRollouts] = []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    async def take(self, step: int) -> StepRollouts:
        into = StepRollouts()
        for number in range(self._collector.settings.prompts):
            draw = self._task_stream.draw()
            task = cast(TraceTask, draw.task)
            rollout = await play_trace(self._collector.runner, task, group=f"{step}-0-{number}")
            into.draws.append(draw)
            into.finished.append(rollout)
            into.groups.append(score_trace(task, rollout))
        return into

    async def wait_until_idle(self) -> None:
        pass

    def on_published(self) -> None:
        pass


def score_trace(task: TraceTask, rollout: Rollout) -> ScoredGroup:
    """The group of a trace."""
    scores = (0.0,) * len(rollout.turns)
    return ScoredGroup(task, (ScoredRollout(rollout, EMPTY, 1.0, scores, success=True),))
