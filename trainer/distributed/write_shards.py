"""Writes a checkpoint on all ranks: each copies its part to the host's memory, and writes that in the background."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult

from trainer.distributed.connect_ranks import ProcessGroupRanks
from trainer.distributed.errors import RankError
from trainer.distributed.rank_failures import describe_failure, report_failure
from trainer.distributed.settings import DISK_TIMEOUT_S
from trainer.policy.shards import INDEX_FILE, TrainedPart, digest_file, first_failure
from trainer.worker_thread import run_in_background

WRITTEN_KEY = "written/{}"
"""In the store: the folder into which a rank wrote its part last."""
Digests = dict[str, str]
"""The sha256 of each file that was written, by its name; on rank 0."""


def begin_writing(parts: Sequence[TrainedPart], folder: Path, ranks: ProcessGroupRanks) -> Future[Digests]:
    """Copies this rank's tensors, and starts to write them to a folder that all ranks see. Runs on all ranks."""
    if not folder.is_dir():  # torch would create it, on this machine's own disk.
        problem = f"{folder.parent} is not there on this machine"
        raise RankError(problem, "put the run's folder on a file system that all machines share, at the same path")
    if ranks.background is not None:  # It is over on rank 0, and so about to be over here.
        wait([ranks.background], DISK_TIMEOUT_S)
    tensors: dict[str, Tensor] = {}
    for part in parts:
        tensors |= part.tensors_by_key | part.optimizer_by_key
    copies = {key: value.clone() if value.device.type == "cpu" else value.cpu() for key, value in tensors.items()}
    group = ranks.background_group  # Made here: making it is a collective call, too.
    work = partial(_write, copies, ShardWriter(folder, ranks), ranks, group)
    ranks.background = run_in_background("checkpoint", work)
    return ranks.background


def find_unwritten(store: Store, folder: Path, names: Mapping[int, str]) -> list[str]:
    """The names of the ranks that have not written their part of a checkpoint; none if the store is lost."""
    text, unwritten = _mark(folder), []
    with suppress(RuntimeError):
        for rank, name in names.items():
            key = WRITTEN_KEY.format(rank)
            if not store.check([key]) or store.get(key).decode() != text:
                unwritten.append(name)
    return unwritten


def _write(copies: Any, writer: ShardWriter, ranks: ProcessGroupRanks, group: dist.ProcessGroup) -> Digests:
    """Writes the copies, and waits until all ranks have."""
    try:
        save(copies, storage_writer=writer, process_group=group)
    except CheckpointException as error:  # On every rank, whichever failed.
        raise first_failure(error) from error
    except Exception as error:
        if ranks.rank:  # The others wait for this one, and learn of it in no other way.
            report_failure(ranks.side_store, ranks.rank, describe_failure(ranks.rank, error))
        raise
    return writer.digests


class ShardWriter(FileSystemWriter):
    """Writes torch's format, and tells rank 0 the digest of every file, so that a later change is noticed."""

    def __init__(self, folder: Path, ranks: ProcessGroupRanks) -> None:
        super().__init__(folder, per_thread_copy_ahead=0)  # The copies are in host memory: no GPU is needed for them.
        self._folder, self._own_files = folder, f"__{ranks.rank}_*"
        self._store, self._key = ranks.side_store, WRITTEN_KEY.format(ranks.rank)
        self.digests: Digests = {}

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Any:
        """Writes this rank's file; its digest goes to rank 0 with the other results."""
        future = super().write_data(plan, planner)
        results = future.value()
        for file in self._folder.glob(self._own_files):
            results.append(WriteResult(MetadataIndex(file.name), 0, digest_file(file)))
        with suppress(RuntimeError):  # If the store is lost, so is the run; rank 0 tells it.
            self._store.set(self._key, _mark(self._folder))
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Writes the index, on rank 0."""
        digests = [item for written in results for item in written if _is_digest(item)]
        self.digests = {item.index.fqn: item.storage_data for item in digests}
        super().finish(metadata, [[item for item in written if not _is_digest(item)] for written in results])
        self.digests[INDEX_FILE] = digest_file(self._folder / INDEX_FILE)


def _mark(folder: Path) -> str:
    return str(folder.absolute())


def _is_digest(item: WriteResult) -> bool:
    return isinstance(item.storage_data, str)
