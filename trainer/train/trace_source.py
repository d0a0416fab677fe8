"""Where the steps of SFT take their rollouts from: traces, played when they are drawn."""

from __future__ import annotations

from typing import cast

from gateway.types import EMPTY
from trainer.data.traces import TraceTask
from trainer.reward.scorer import ScoredGroup, ScoredRollout
from trainer.rollout.rollout import Rollout
from trainer.rollout.task import Task
from trainer.rollout.trace_player import play_trace
from trainer.train.collect import StepRollouts
from trainer.train.modes import SyncRollouts


class TraceSource(SyncRollouts):
    """Plays the traces of a step; each counts as a success, whose reward is 1."""

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


def score_trace(task: Task, rollout: Rollout) -> ScoredGroup:
    """The group of a trace."""
    scores = (0.0,) * len(rollout.turns)
    return ScoredGroup(task, (ScoredRollout(rollout, EMPTY, 1.0, scores, success=True),))
