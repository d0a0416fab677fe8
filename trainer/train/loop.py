"""The loop: roll out, score, learn, publish; look now and then; keep what a later start needs."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from anyio import move_on_after, to_thread

from trainer.engine.base import Engine
from trainer.learn.lesson import lesson
from trainer.learn.lesson import metrics as lesson_metrics
from trainer.ledger import NOTHING
from trainer.policy import chance
from trainer.policy.learner import Learner
from trainer.policy.policy import Policy
from trainer.reward.scored import metrics as reward_metrics
from trainer.run.file import Writer
from trainer.thread import OwnThread
from trainer.train.alarms import Alarms
from trainer.train.evaluate import Evaluation, evaluate
from trainer.train.folder import Folder
from trainer.train.job import Job
from trainer.train.metrics import Metrics
from trainer.train.modes import Rolling, rolling_of
from trainer.train.reports import Reports
from trainer.train.rolling import Rolled, Roller
from trainer.view.training import TrainingProgress

KEEP_S = 5.0
"""To write what is over to the disk, when the run is stopped in the midst of a step."""
BARREN = 3
"""Steps in a row of which nothing could be scored: what is broken does not mend itself."""
SHOWN = 3
"""Of the reasons why, the commonest."""


class NothingScored(Exception):
    """Infrastructure ended every rollout, step after step."""

    def __init__(self, reasons: Counter[str]) -> None:
        commonest = "".join(f"\n  {count} x {reason}" for reason, count in reasons.most_common(SHOWN))
        remedy = "mend what these name, then go on with --resume from the last step that was learned from"
        super().__init__(
            f"nothing of the last {BARREN} steps could be scored; of the last one:{commonest}\n  remedy: {remedy}"
        )


@dataclass
class Training:
    """What goes from step to step."""

    job: Job
    folder: Folder
    engine: Engine
    policy: Policy
    learner: Learner
    progress: TrainingProgress
    metrics: Metrics
    reports: Reports
    writer: Writer
    thread: OwnThread
    """Where it learns."""
    step: int = 0
    """Done so far; the version of the weights that the engine has."""
    alarms: Alarms = field(default_factory=Alarms)
    barren: int = 0
    saved: int = -1
    """The step of the latest checkpoint."""
    saved_at: float = field(default_factory=time.monotonic)
    saving_s: float = 0.0

    async def run(self) -> None:
        job, settings = self.job, self.job.settings
        if not self.step:
            await self._look_before()
        more = self.progress.more if settings.mode == "synchronous" else _uncounted
        roller = Roller(job.player(self.engine, self.progress), job.scorer, settings, more)
        async with rolling_of(roller, job.course, lambda: self.step) as rolling:
            try:
                while self.step < settings.steps:
                    await self._step(self.step + 1, rolling)
            finally:
                with move_on_after(KEEP_S, shield=True):
                    await to_thread.run_sync(self._keep, rolling.untaken)
        if self.saved != self.step:
            await self._save()

    async def _step(self, step: int, rolling: Rolling) -> None:
        progress, settings = self.progress, self.job.settings
        in_step = settings.mode == "synchronous"
        progress.begin(step, settings.prompts * settings.n if in_step else 0)
        before = dict(self.engine.counted)
        with progress.phase(rolling.phase):
            rolled = await rolling.take(step)
        await to_thread.run_sync(self._keep, [rolled])
        told = (
            {"step": float(step), "policy/version": float(self.step)}
            | reward_metrics(rolled.scored)
            | rolled.metrics(self.step)
            | Evaluation.of(rolled.scored, 0, settings.evaluation.kind).by_kind("success/sampled")
            | ({} if in_step else rolled.staleness(self.step))
            | {f"engine/{name}": now - before.get(name, 0) for name, now in self.engine.counted.items()}
        )
        with progress.phase("learning"):
            lent = in_step and await self.engine.lend()
            told |= await self.thread.run(partial(self._learn, rolled))
            while self.learner.notes:
                progress.said(self.learner.notes.pop(0))
            if lent:
                self.policy.shrink()
        with progress.phase(rolling.phase):
            await rolling.rest()
        with progress.phase("publishing"):
            weights = await self.thread.run(lambda: self.policy.weights)  # Adapters are merged, layer by layer.
            await self.engine.publish(weights, step)
        if found := self.engine.agreement:
            told |= found.told
        self.step = step
        self.job.course.tell(step - 1, told.get("success/sampled"))
        self.job.course.settle(rolled.draws)
        rolling.published()
        if settings.evaluation.every and (step % settings.evaluation.every == 0 or step == settings.steps):
            told |= await self._look()
        self._tell(told, rolled.reasons)
        if not self._barren(rolled):
            await self._save_if_due()

    def _keep(self, several: Sequence[Rolled]) -> None:
        """Whatever ends a step, what is over is saved."""
        for rolled in several:
            for rollout in rolled.rollouts:
                self.writer.add(rollout)

    def _learn(self, rolled: Rolled) -> dict[str, float]:
        if not any(group.scored for group in rolled.groups):
            return {}
        learned = lesson(rolled.groups, self.job.settings.algorithm, self.job.rounds, self.step)
        told = lesson_metrics(learned) | self.learner.learn(learned)
        self.writer.credit(self.step + 1, self.learner.weighed)
        return told

    async def _look(self) -> dict[str, float]:
        """At a few tasks that are not trained on, by the likeliest tokens."""
        settings, job = self.job.settings, self.job
        tasks = job.held_out(settings.evaluation.few)
        with self.progress.phase("evaluating", rollouts=len(tasks)) as watch:
            player = job.greedy(job.player(self.engine, watch))
            seen = await evaluate(player, job.scorer, tasks, settings.admission, settings.evaluation.kind)
        told = {"eval/greedy": seen.all.value, "eval/tasks": float(seen.all.tried), "eval/lost": float(seen.lost)}
        return told | seen.by_kind("eval/greedy")

    async def _look_before(self) -> None:
        if self.job.settings.evaluation.every:
            self._tell({"step": 0.0} | await self._look())

    def _tell(self, told: dict[str, float], reasons: Mapping[str, int] = NOTHING) -> None:
        step = int(told.pop("step"))
        whole = told | self.progress.measured()
        self.metrics.add(step, whole)
        self.reports.log(step, whole)
        for alarm in self.alarms.look(whole, reasons):
            self.progress.said(alarm)
        self.progress.stepped(step, whole)

    async def _save_if_due(self) -> None:
        chosen, now = self.job.settings.checkpoint, time.monotonic()
        if chosen.every is None:
            due = self.saving_s <= chosen.share * (now - self.saved_at)
        else:
            due = self.step % chosen.every == 0
        if due:
            await self._save()

    async def _save(self) -> None:
        began = time.monotonic()
        with self.progress.phase("saving"):
            state = {"position": self.job.course.position, "rollouts": self.folder.written}
            await to_thread.run_sync(self.folder.checkpoints.save, self.step, state, self._write)
        self.saved, self.saved_at = self.step, time.monotonic()
        self.saving_s = self.saved_at - began

    def _write(self, folder: Path) -> None:
        """A model as `from_pretrained` loads it, or its adapters alone where those are learned."""
        self.policy.save(folder)
        chance.save(folder)
        self.job.spoken(folder)

    def _barren(self, rolled: Rolled) -> bool:
        """Whether nothing came of a step. It is not saved either, or it would take the place of one that is good."""
        self.barren = 0 if any(group.scored for group in rolled.groups) else self.barren + 1
        if self.barren == BARREN:
            raise NothingScored(rolled.reasons)
        return self.barren > 0


def _uncounted(rollouts: int) -> None:
    """Where rollouts run ahead, nobody is told how many a step will have."""
