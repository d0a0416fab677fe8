"""Rank 0's side: starts and connects the ranks, and a policy and an updater that tell the others what to do."""

from __future__ import annotations

import pickle
import signal
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import ExitStack, asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from tempfile import NamedTemporaryFile
from threading import current_thread, main_thread
from types import FrameType, TracebackType
from typing import Any, Self

import anyio
from anyio import to_thread
from torch import Tensor

from gateway.types import Image
from trainer.algorithms.settings import AlgorithmSettings
from trainer.algorithms.train_batch import TrainBatch
from trainer.distributed.connect_ranks import LocalRanks, ProcessGroupRanks, connect_ranks
from trainer.distributed.end_stuck_rank import LeaderWatch
from trainer.distributed.errors import LostRankError, RankError
from trainer.distributed.fingerprint import digest_model, find_versions, require_alike
from trainer.distributed.rank_commands import END, RANK_REMEDY, LeaderChannel, write_batch
from trainer.distributed.rank_environment import detect_environment
from trainer.distributed.rank_failures import is_connection_error
from trainer.distributed.rank_output import copy_output, rank_log
from trainer.distributed.settings import DISK_TIMEOUT_S, DistributedSettings, count_ranks
from trainer.distributed.sharded_model import require_torch
from trainer.distributed.sharded_policy import ShardedPolicy
from trainer.distributed.sharded_weights import ShardedWeights
from trainer.distributed.write_shards import Digests, find_unwritten
from trainer.model import SHARDS_FOLDER
from trainer.policy.memory_parts import MemoryPart, MemoryPlan
from trainer.policy.policy import loading_checkpoint
from trainer.policy.settings import UpdateSettings
from trainer.policy.shards import has_shards, require_same_parts
from trainer.policy.update import PolicyUpdater
from trainer.pretrained import trusts_code
from trainer.vision.image_processor import ImageProcessor

FindEnded = Callable[[], Mapping[int, str]]
WATCH_S = 0.5
DISK_REMEDY = "look at that machine and the disk of the run's folder"
CLOSE_S = 30.0
"""How long the ranks may take to end."""


class LeadPolicy(ShardedPolicy):
    """The policy on rank 0: each method first tells the other ranks to do their part."""

    def __init__(
        self,
        channel: LeaderChannel,
        folder: Path,
        settings: UpdateSettings,
        image_processor: ImageProcessor | None = None,
    ) -> None:
        self.channel = channel
        about = {"model": str(folder.absolute()), "trusts_code": trusts_code(folder)}
        arguments = {**about, "update": settings.model_dump(mode="json")}
        with channel.command("load", arguments):
            super().__init__(folder, settings, channel.ranks, image_processor)

    @classmethod
    def lead(
        cls,
        channel: LeaderChannel,
        folder: Path,
        settings: UpdateSettings,
        image_processor: ImageProcessor | None = None,
    ) -> Self:
        """Loads the model in a folder on all ranks."""
        return cls(channel, folder, settings, image_processor or ImageProcessor.load(folder))

    @property
    def weights(self) -> Mapping[str, Tensor]:
        return ShardedWeights(self.channel, self)

    def compute_logprobs(self, ids: Sequence[int], images: Sequence[Image] = ()) -> list[float]:
        with self.channel.command("logprobs", {"ids": list(ids)}, pickle.dumps(list(images))):
            return super().compute_logprobs(ids, images)

    def save(self, folder: Path) -> Callable[[], Mapping[str, str]]:
        shards = folder / SHARDS_FOLDER
        shards.mkdir(parents=True)
        self.write_model_settings(folder)
        with self.channel.command("save", {"folder": str(shards.absolute())}):
            written = self.save_shards(shards)
        return partial(wait_for_shards, written, shards, self.channel)

    def resume(self, folder: Path) -> None:
        if has_shards(folder):
            with loading_checkpoint(folder / SHARDS_FOLDER):
                require_same_parts(folder, self.trained_parts)
            with self.channel.command("load_shards", {"folder": str(folder.absolute())}):
                self.load_shards(folder)
            return
        weights, state = self.read_state(folder)
        with self.channel.command("resume", {"steps": state["steps"]}):
            self.scatter_state(weights, state)


def wait_for_shards(written: Future[Digests], folder: Path, channel: LeaderChannel) -> Mapping[str, str]:
    """Waits until all ranks have written their parts; returns the digests of the files by their paths.

    Raises LostRankError as soon as one of them cannot do so any more, and after DISK_TIMEOUT_S.
    """
    deadline = time.monotonic() + DISK_TIMEOUT_S
    try:
        while not wait([written], WATCH_S).done:
            if cause := channel.find_cause("checkpoint"):
                raise cause
            if time.monotonic() > deadline:
                problem = f"a checkpoint was not written within {DISK_TIMEOUT_S:g} s{_name_unwritten(folder, channel)}"
                raise LostRankError(problem, DISK_REMEDY)
        digests = written.result()
    except RuntimeError as error:
        if not is_connection_error(error):
            raise
        problem = f"the ranks lost each other while they wrote a checkpoint{_name_unwritten(folder, channel)}"
        raise LostRankError(problem, RANK_REMEDY) from error
    return {f"{SHARDS_FOLDER}/{name}": digest for name, digest in digests.items()}


def _name_unwritten(folder: Path, channel: LeaderChannel) -> str:
    unwritten = find_unwritten(channel.ranks.side_store, folder, channel.names)
    return f", without the part of {', '.join(unwritten)}" if unwritten else ""


class LeadUpdater(PolicyUpdater):
    """The updater on rank 0."""

    def __init__(self, policy: LeadPolicy, algorithm: AlgorithmSettings, **options: Any) -> None:
        self._channel = policy.channel
        with self._channel.command("updater", {"algorithm": algorithm.model_dump(mode="json"), **options}):
            super().__init__(policy, algorithm, **options)

    def train_step(self, train_batch: TrainBatch) -> dict[str, float]:
        with self._channel.command("train_step", content=write_batch(train_batch)):
            return super().train_step(train_batch)


class EndSignal:
    """SIGTERM, with which launchers end all ranks as soon as one has ended: rank 0 first says why.

    After an error it stays ignored, since the process is about to tell it and to end; launchers kill after some time.
    """

    def __init__(self, launcher: str) -> None:
        self._launcher, self._is_set = launcher, False
        self._is_main = current_thread() is main_thread()  # Other threads cannot handle signals.

    def __enter__(self) -> Self:
        if self._is_main:
            self._before = signal.signal(signal.SIGTERM, self._receive)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None and self._is_main:
            signal.signal(signal.SIGTERM, self._before)

    def find_ended(self) -> Mapping[int, str]:
        """Rank 0, once it was told to end."""
        reason = f"was told to end by {self._launcher} (SIGTERM): another rank ended, or the job was stopped,"
        return {0: reason} if self._is_set else {}

    def _receive(self, _: int, __: FrameType | None) -> None:
        self._is_set = True


@asynccontextmanager
async def open_ranks(
    settings: DistributedSettings,
    run_settings: Mapping[str, Any],
    model: Path,
    folder: Path,
    needs: Sequence[MemoryPart] = (),
) -> AsyncIterator[LeaderChannel | None]:
    """Starts the ranks if the settings ask for them, and connects them; None if this process trains alone.

    `needs` is the memory of each other rank.
    """
    environment = detect_environment()
    if count_ranks(settings) == 1:
        yield None
        return
    require_torch()
    local = None
    with ExitStack() as stack:
        if environment is None:
            local = stack.enter_context(LocalRanks(settings, folder))
            environment = local.environment
            find_ended: FindEnded = local.find_ended
        else:
            find_ended = stack.enter_context(EndSignal(environment.launcher)).find_ended
        connect = partial(connect_ranks, environment, settings, local.listener if local else None, find_ended)
        ranks, names = await to_thread.run_sync(connect, abandon_on_cancel=True)
        channel = LeaderChannel(ranks, find_ended, names)
        if local is None:
            await to_thread.run_sync(copy_output, rank_log(folder, 0))
        stack.callback(_disconnect, channel)
        watch = LeaderWatch(channel, local.kill if local else lambda: None)  # Other launchers end their ranks.
        with ranks.watchdog.watching(range(1, ranks.size), watch.look):
            await to_thread.run_sync(_check, channel, run_settings, model, folder, needs)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(_watch, channel, watch)
                try:
                    yield channel
                finally:
                    tasks.cancel_scope.cancel()
            with anyio.move_on_after(CLOSE_S, shield=True):
                await to_thread.run_sync(_end, channel, abandon_on_cancel=True)


async def _watch(channel: LeaderChannel, watch: LeaderWatch) -> None:
    """Ends the run when a rank's process ends or is stopped, also while nothing is asked of it."""
    try:
        while not channel.find_ended():
            watch.mark_loop()
            await anyio.sleep(WATCH_S)
    finally:
        watch.loop_seen_s = None
    error = await to_thread.run_sync(channel.find_cause, "rollouts", abandon_on_cancel=True)
    raise error or LostRankError("a rank has ended", RANK_REMEDY)


def _check(
    channel: LeaderChannel, run_settings: Mapping[str, Any], model: Path, folder: Path, needs: Sequence[MemoryPart]
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with NamedTemporaryFile(dir=folder.absolute(), prefix=".ranks-") as mark:  # All ranks write checkpoints there.
        arguments = {"model": str(model.absolute()), "mark": mark.name}
        with channel.command("check", arguments):
            own = {"versions": find_versions(), "settings": run_settings, "model files": digest_model(model)}
    for rank, answer in enumerate(channel.answers, 1):
        if problem := answer.get("problem"):
            raise RankError(f"{channel.names[rank]}: {problem}", "start all ranks with the same command and run file")
    require_alike(own, channel.answers, channel.names)
    for rank, answer in enumerate(channel.answers, 1):
        plan = MemoryPlan(tuple(needs), answer["free"])
        if not plan.fits:
            raise RankError(f"{channel.names[rank]}: this run does not fit: {plan}", plan.remedy)


def _end(channel: LeaderChannel) -> None:
    if not channel.is_broken:
        with channel.command(END):
            pass


def _disconnect(channel: LeaderChannel) -> None:
    ranks: ProcessGroupRanks = channel.ranks
    if ranks.device.type == "cpu" or not channel.is_broken:  # Closing broken NCCL groups could wait for ever.
        with suppress(RuntimeError):
            ranks.close()
