"""The training loop: generate and score rollouts, train, publish weights, evaluate, report, and save checkpoints."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from anyio import move_on_after, to_thread

from gateway.disk_errors import describe_write_error
from gateway.errors import OperatorError
from gateway.types import EMPTY
from trainer.algorithms.train_batch import TrainBatch, build_train_batch, compute_batch_metrics
from trainer.distributed.rank_environment import RESTARTS_KEY, RankRestarts
from trainer.engine.base import NOT_FINITE, Engine, PolicyWeights
from trainer.policy import rng
from trainer.policy.lora import LoraWeights
from trainer.policy.machine_use import MachineUse
from trainer.policy.policy import Policy
from trainer.policy.update import PolicyUpdater
from trainer.reward.scorer import compute_reward_metrics, compute_reward_times
from trainer.rollout.rollout import StopReason
from trainer.storage.rollout_file import RolloutWriter, RunError, resume_hint
from trainer.storage.run_files import MetricsWriter
from trainer.train.alarms import Alarms
from trainer.train.checkpoint import LOST_METRIC, METRIC, TASKS_METRIC, BestCheckpoint, Finish, measured_value
from trainer.train.collect import StepCollector, StepRollouts, account_for_tokens
from trainer.train.early_stop import EarlyStop
from trainer.train.evaluate import Evaluation, evaluate
from trainer.train.job import Job, copy_tokenizer_files
from trainer.train.modes import RolloutSource, make_rollout_source
from trainer.train.reporters import Reporters
from trainer.train.run_folder import TAPES, RunFolder
from trainer.view.training_progress import TrainingProgress
from trainer.worker_thread import WorkerThread

if TYPE_CHECKING:
    from torch import Tensor

    from gateway.loop_watchdog import LoopWatchdog

SAVE_ROLLOUTS_S = 5.0
"""Seconds to save finished rollouts if the run is stopped during a step."""
FINISH_CHECKPOINT_S = 60.0
"""Seconds to finish a checkpoint that is being written then."""
PASSING_REASONS = (StopReason.ENGINE_FAILED, StopReason.TOOL_FAILED, StopReason.WORKER_LOST)
"""Why rollouts are lost that the same settings may bring to their end the next time, but for weights that are NaN."""
SHOWN_REASONS = 3
"""How many of the most frequent reasons are shown if no rollout of a step could be scored."""
SAVING_SHARE = 0.1
"""The share of the time that saving may take, unless the settings say how often it is done."""


class NothingScoredError(OperatorError):
    """No rollout of a step could be scored, so that there is nothing to learn from. Schedulers and `--restarts` start a
    run again that ends with exit code 1: one whose servers, tools or workers failed."""

    def __init__(self, step: int, reasons: Counter[str]) -> None:
        self.exit_code = 1 if any(map(_is_passing, reasons)) else 2
        commonest = "".join(f"\n  {count} x {reason}" for reason, count in reasons.most_common(SHOWN_REASONS))
        remedy = "fix these problems, then continue with --resume; the steps before it are saved"
        super().__init__(
            f"no rollout of step {step} could be scored, so the run stops; the reasons:{commonest}\n  remedy: {remedy}"
        )


def _is_passing(reason: str) -> bool:
    return NOT_FINITE not in reason and reason.startswith(tuple(f"{stop}: " for stop in PASSING_REASONS))


@dataclass
class TrainLoop:
    """The state of a training run, and its loop."""

    job: Job
    folder: RunFolder
    engine: Engine
    policy: Policy
    updater: PolicyUpdater
    progress: TrainingProgress
    metrics: MetricsWriter
    reporters: Reporters
    writer: RolloutWriter
    thread: WorkerThread
    """Runs the updates."""
    step: int = 0
    """Steps made so far, and the version of the engine's weights."""
    alarms: Alarms = field(default_factory=Alarms)
    early_stop: EarlyStop = field(default_factory=partial(EarlyStop, None))
    best: BestCheckpoint = field(init=False)
    """The best step by its evaluation; its checkpoint is kept."""
    saved_step: int = -1
    """The step of the latest checkpoint."""
    saved_at: float = field(default_factory=time.monotonic)
    saving_s: float = 0.0
    machine: MachineUse = field(default_factory=MachineUse)
    restarts: RankRestarts | None = None
    """Those of the ranks, if there are several."""

    async def run(self) -> None:
        """Makes the steps that are left."""
        job, settings, progress, thread = self.job, self.job.settings, self.progress, self.thread
        self.best = BestCheckpoint(self.folder.path, self.step)
        self.folder.checkpoints.best_step = self.best.step
        if not self.step and settings.evaluation.every:
            await self._evaluate_before()
        is_synchronous = settings.mode == "synchronous"
        on_extra = progress.add_rollouts if is_synchronous else lambda _: None  # They are not a step's.
        collector = StepCollector(job.make_runner(self.engine, progress), job.scorer, settings, on_extra)
        async with (
            make_rollout_source(collector, job.task_stream, lambda: self.step) as source,
            self._saving_what_is_done(source),
        ):
            while self.step < settings.steps and not self.early_stop.reason:
                step = self.step + 1
                progress.begin(step, settings.prompts * settings.n if is_synchronous else 0)
                counters_before, rollout_bytes = dict(self.engine.counters), self.folder.rollout_bytes
                with progress.phase(source.phase), self.machine.phase("generating"):  # And score.
                    rollouts = await source.take(step)
                await to_thread.run_sync(self._save_rollouts, [rollouts])
                self._require_tape()
                metrics = {"step": float(step)} | self._measure_rollouts(rollouts, counters_before)
                with progress.phase("learning"), self.machine.phase("update"):
                    has_released = is_synchronous and await self.engine.release_memory()
                    if any(group.scored for group in rollouts.groups):
                        batch = await thread.run(partial(self._build_batch, rollouts))
                        metrics |= await thread.run(partial(self.updater.train_step, batch))
                        metrics |= await thread.run(partial(self._account_for_batch, rollouts, batch))
                    else:
                        metrics |= account_for_tokens(rollouts).metrics
                    while self.updater.pending_notes:
                        progress.print_message(self.updater.pending_notes.pop(0))
                    if has_released:
                        self.policy.release_cached_memory()
                if not any(group.scored for group in rollouts.scored):
                    self._report(metrics, rollouts.lost_reasons, is_reported=True)
                    if self.saved_step != self.step:  # A resumed run draws the tasks of this step again.
                        await self._save(rollout_bytes)
                        await self._wait_until_saved()
                    raise NothingScoredError(step, rollouts.lost_reasons)
                with progress.phase(source.phase):
                    await source.wait_until_idle()
                with progress.phase("publishing"), self.machine.phase("publishing"):
                    metrics |= await self._publish(step)
                self.step = step
                job.task_stream.finish_step(step - 1, metrics.get("success/sampled"))
                job.task_stream.mark_done(rollouts.draws)
                metrics |= self._remember_outcomes(rollouts, metrics) if settings.sft is None else {}
                source.on_published()
                self.early_stop.add(metrics)
                is_last = step == settings.steps or self.early_stop.reason is not None
                if settings.evaluation.every and (step % settings.evaluation.every == 0 or is_last):
                    metrics |= (evaluation := await self._evaluate())
                    self.early_stop.add(evaluation)
                self._report(metrics | self.machine.take_metrics(), rollouts.lost_reasons)
                await self._save_if_due(measured_value(metrics))
        await self._finish()

    async def _finish(self) -> None:
        """Says why the run ends before its last step, and saves the present one."""
        steps = self.job.settings.steps
        if self.step < steps and (reason := self.early_stop.reason):
            self.progress.print_message(f"the run ends after step {self.step} of {steps}: {reason}")
        if self.saved_step != self.step:
            await self._save()
        await self._wait_until_saved()

    @asynccontextmanager
    async def _saving_what_is_done(self, source: RolloutSource) -> AsyncIterator[None]:
        """Saves the rollouts that no step has taken. If the run ends with an error, first lets a checkpoint that is
        being written be whole."""
        try:
            yield
        except BaseException:
            with move_on_after(FINISH_CHECKPOINT_S, shield=True), suppress(Exception):
                await to_thread.run_sync(self.folder.checkpoints.wait, abandon_on_cancel=True)
            raise
        finally:
            with move_on_after(SAVE_ROLLOUTS_S, shield=True):
                await to_thread.run_sync(self._save_rollouts, source.pending)

    def _measure_rollouts(self, rollouts: StepRollouts, counters_before: Mapping[str, float]) -> dict[str, float]:
        """Metrics of a step's rollouts, of the engine that generated them, and of plug-ins."""
        job = self.job
        if job.settings.sft is not None:  # Nobody sampled or scored the traces.
            measured = rollouts.metrics(self.step)
            unknown = ("rollout/logprob", "rollout/staleness")
            return {"policy/version": float(self.step)} | {
                name: value for name, value in measured.items() if name not in unknown
            }
        by_kind = Evaluation.from_groups(rollouts.scored, 0)
        metrics = (
            {"policy/version": float(self.step)}
            | compute_reward_metrics(rollouts.scored)
            | compute_reward_times(rollouts.scored)
            | job.scorer.given.take_metrics()
            | rollouts.metrics(self.step)
            | (dict(job.engine_player.take_metrics()) if job.engine_player else {})
        )
        for part in job.settings.parts:
            metrics |= part.compute_metrics(rollouts.finished)
        return (
            metrics
            | by_kind.metrics_by_kind("success/sampled")
            | by_kind.kind_shares("rollout/kind")
            | ({} if job.settings.mode == "synchronous" else rollouts.staleness_metrics(self.step))
            | (self.restarts.take_metrics() if self.restarts else {})
            | {f"engine/{name}": now - counters_before.get(name, 0) for name, now in self.engine.counters.items()}
        )

    def _remember_outcomes(self, rollouts: StepRollouts, metrics: Mapping[str, float]) -> dict[str, float]:
        """Counts each task's successes; metrics of what is known of tasks, and of tokens that taught nothing."""
        outcomes = self.job.task_stream.outcomes
        for group in rollouts.scored:
            if group.scored:
                outcomes.record(group.task.key, sum(scored.success for scored in group.scored), len(group.scored))
        idle = sum(metrics.get(f"tokens/left_out/{reason}", 0.0) for reason in ("replaced", "no_gradient"))
        return outcomes.metrics | {"tasks/wasted_tokens": idle / max(1.0, metrics.get("tokens/sampled", 0.0))}

    async def _publish(self, step: int) -> dict[str, float]:
        """Gives the engine the new weights; returns the seconds of each stage, and what each server got."""
        began = time.monotonic()
        weights = await self.thread.run(self._take_weights)
        await self.engine.publish(weights, step)
        total = time.monotonic() - began
        gather_s = weights.gather_s if isinstance(weights, PolicyWeights) else 0.0
        if isinstance(weights, LoraWeights):
            await self.thread.run(weights.free)
        metrics = {"time/publish/gather_s": gather_s, "time/publish/transfer_s": total - gather_s}
        sent = self.engine.published_bytes
        metrics |= {"publish/megabytes": sent / 1e6} if sent else {}
        return metrics | (agreement.metrics if (agreement := self.engine.agreement) else {})

    def _take_weights(self) -> Mapping[str, Tensor]:
        """The weights. If the engine needs adapters merged, that is done here, in the training thread."""
        weights = self.policy.weights
        if isinstance(weights, LoraWeights) and not self.engine.capabilities.takes_adapters:
            weights.merge()
        return weights

    def _require_tape(self) -> None:
        """Ends the run if its tape cannot be written: no call is answered any more."""
        error: OSError | None = getattr(self.job.gateway, "recording_error", None)
        if error is not None:
            run = self.folder.path
            raise RunError(describe_write_error(run / TAPES, error, resume_hint(run))) from error

    def _save_rollouts(self, steps: Sequence[StepRollouts]) -> None:
        """Saves finished rollouts, also if the run is stopped."""
        for step_rollouts in steps:
            for rollout in step_rollouts.rollouts:
                self.writer.add(rollout)

    def _build_batch(self, rollouts: StepRollouts) -> TrainBatch:
        return build_train_batch(rollouts.groups, self.job.settings.algorithm, self.job.token_weight_fn, self.step)

    def _account_for_batch(self, rollouts: StepRollouts, batch: TrainBatch) -> dict[str, float]:
        """Saves what the batch's tokens were credited with; metrics of every token that was sampled for the step."""
        self.writer.add_credits(self.step + 1, self.updater.last_rows)
        account = account_for_tokens(rollouts, self.updater.last_rows, self.updater.last_trained)
        return compute_batch_metrics(batch) | account.metrics

    async def _evaluate(self) -> dict[str, float]:
        """Evaluates a few held-out tasks with greedy decoding, and with several sampled tries if these are set."""
        settings, job = self.job.settings, self.job
        tasks = job.held_out(settings.evaluation.rows)
        tries, sampled = settings.evaluation.k, None
        rollouts = len(tasks) * (1 + tries * (tries > 1))
        with self.progress.phase("evaluating", rollouts=rollouts) as observer:
            runner = job.make_runner(self.engine, observer)
            evaluation = await evaluate(job.make_greedy(runner), job.scorer, tasks, settings.concurrency)
            if tries > 1:
                sampled = await evaluate(runner, job.scorer, tasks, settings.concurrency, tries)
        job.scorer.given.take_metrics()  # What is measured in evaluations is not that of a step.
        metrics = {TASKS_METRIC: float(evaluation.all.tried), LOST_METRIC: float(evaluation.lost)}
        if evaluation.all.tried:  # Without a scored task there is no rate.
            metrics[METRIC] = evaluation.all.value
            if measured_value(metrics) is None:
                text = f"{evaluation.lost} of {len(tasks)} held-out tasks were lost: their success is not compared"
                self.progress.print_message(text)
        if sampled is not None:
            metrics |= sampled.tries_metrics(tries)
        return metrics | evaluation.metrics_by_kind(METRIC)

    async def _evaluate_before(self) -> None:
        """Evaluates the model before its first step."""
        metrics = await self._evaluate()
        self._report({"step": 0.0} | metrics)
        if (value := measured_value(metrics)) is not None:
            self._record_best(value)

    def _record_best(self, value: float) -> None:
        """The present step is the best; the checkpoint of the one before it may go."""
        self.best.record(self.step, value)
        self.folder.checkpoints.best_step = self.step

    def _report(
        self, metrics: dict[str, float], lost_reasons: Mapping[str, int] = EMPTY, *, is_reported: bool = False
    ) -> None:
        """Writes a step's metrics, and prints progress and alarms, unless what is wrong is told by an error."""
        step = int(metrics.pop("step"))
        metrics = metrics | self.progress.take_metrics()
        watchdog: LoopWatchdog | None = getattr(self.job.gateway, "loop_watchdog", None)
        if watchdog is not None:  # A remote gateway has none.
            metrics["engine/loop_blocked_seconds"] = watchdog.take_longest()
        self.metrics.add(step, metrics)
        self.reporters.log(step, metrics)
        for alarm in () if is_reported else self.alarms.check(metrics, lost_reasons):
            self.progress.print_message(alarm)
        self.progress.end_step(step, metrics)

    async def _save_if_due(self, value: float | None) -> None:
        """Saves the present step if its evaluation, if there is one, is the best, or if it is time to."""
        if value is not None and self.best.is_improved_by(value):
            await self._save()
            await self._wait_until_saved()  # Until it is on the disk, the one before it is the best.
            self._record_best(value)
            return
        self.folder.checkpoints.raise_failure()
        checkpoint, now = self.job.settings.checkpoint, time.monotonic()
        if checkpoint.every is None:
            is_due = self.saving_s <= SAVING_SHARE * (now - self.saved_at)
        else:
            is_due = self.step % checkpoint.every == 0
        if is_due:
            await self._save()

    async def _wait_until_saved(self) -> None:
        with self.progress.phase("saving"):
            await to_thread.run_sync(self.folder.checkpoints.wait)

    async def _save(self, rollout_bytes: int | None = None) -> None:
        """Saves a checkpoint; `rollout_bytes` is the size of rollouts.jsonl after this step, if it has grown since."""
        started = time.monotonic()
        with self.progress.phase("saving"):
            await to_thread.run_sync(self.writer.sync)  # A checkpoint counts on them.
            await to_thread.run_sync(self.metrics.sync)
            size = self.folder.rollout_bytes if rollout_bytes is None else rollout_bytes
            state = {"position": self.job.task_stream.position, "rollouts": size}
            if self.restarts is not None:
                state[RESTARTS_KEY] = self.restarts.total
            await to_thread.run_sync(self.folder.checkpoints.save, self.step, state, self._write_checkpoint)
        self.saved_step, self.saved_at = self.step, time.monotonic()
        self.saving_s = self.saved_at - started

    def _write_checkpoint(self, folder: Path) -> Finish | None:
        """Writes the policy, the random states, and the tokenizer."""
        finish = self.policy.save(folder)
        rng.save_state(folder)
        copy_tokenizer_files(self.job.model, folder)
        return finish
