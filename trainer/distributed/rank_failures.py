"""What a rank says of its failure through the store where all ranks meet, so that rank 0 tells it by name, once."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from socket import gethostname

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from gateway.errors import OperatorError
from trainer.distributed.watchdog import Stage, find_place
from trainer.policy.memory_plan import is_out_of_memory
from trainer.policy.settings import PolicyError

FAILURE_KEY, ANY_FAILURE_KEY = "failure/{}", "failed"
MEMORY_REMEDY = (
    "lower `update.micro_batch_tokens`, set `update.gradient_checkpointing: true`, or use more ranks, and continue with"
    " --resume; or lower `limits.rollout_tokens` in another run"
)
STUCK_REMEDY = (
    "look at that machine's GPU, memory and network; continue with --resume, or raise `distributed.timeout_s`"
)
CONNECTION_WORDS = ("gloo", "nccl", "connection", "socket", "timed out", "timeout")


@dataclass(frozen=True, slots=True)
class RankFailure:
    """Why a rank has ended."""

    name: str
    problem: str
    remedy: str | None = None
    is_lost: bool = False
    """Whether it only lost its contact with another rank, which is the cause."""
    is_unexpected: bool = False
    """Whether another try may not meet it: nothing in the settings is known to be wrong."""


def name_rank(rank: int) -> str:
    """This process, for messages."""
    return f"rank {rank} ({gethostname()}, process {os.getpid()})"


def describe_failure(rank: int, error: Exception) -> RankFailure:
    """An error of this rank in words."""
    problem, remedy, is_unexpected = str(error), None, not isinstance(error, OperatorError)
    if isinstance(error, PolicyError):
        problem, remedy = error.problem, error.remedy
    elif is_out_of_memory(error):
        problem, remedy, is_unexpected = f"memory ran out ({type(error).__name__})", MEMORY_REMEDY, False
    elif is_unexpected:
        problem = f"{type(error).__name__}: {error}"
    return RankFailure(name_rank(rank), problem, remedy, is_connection_error(error), is_unexpected)


def describe_late_stage(rank: int, stage: Stage, device: torch.device) -> RankFailure:
    """A stage of this rank that lasts too long. With GPUs, no line of code says whether it waits for other ranks."""
    place = find_place(stage.thread)
    problem = f"{stage.name!r} has lasted {stage.limit_s:g} s, in {place.text}"
    waits = place.is_collective or device.type == "cuda"
    return RankFailure(name_rank(rank), problem, STUCK_REMEDY, is_lost=waits, is_unexpected=True)


def report_failure(store: Store, rank: int, failure: RankFailure) -> bool:
    """Tells rank 0; returns False if it cannot be told any more."""
    try:
        store.set(FAILURE_KEY.format(rank), json.dumps(asdict(failure)))
        store.set(ANY_FAILURE_KEY, "")
    except RuntimeError:  # The store is gone with rank 0.
        return False
    return True


def print_failure(failure: RankFailure) -> None:
    """Tells the operator of a failure of which rank 0 cannot know."""
    remedy = f"\n  remedy: {failure.remedy}" if failure.remedy else ""
    sys.stderr.write(f"mtrl-train: {failure.name}: {failure.problem}{remedy}\n")
    sys.stderr.flush()


def read_failures(store: Store, size: int) -> Mapping[int, RankFailure]:
    """The failures of the other ranks so far."""
    if not store.check([ANY_FAILURE_KEY]):
        return {}
    keys = {rank: FAILURE_KEY.format(rank) for rank in range(1, size)}
    return {rank: RankFailure(**json.loads(store.get(key))) for rank, key in keys.items() if store.check([key])}


def is_connection_error(error: BaseException) -> bool:
    """Whether a collective call failed because of another rank. Torch has no type for it with gloo."""
    if not isinstance(error, RuntimeError) or is_out_of_memory(error):
        return False
    return isinstance(error, dist.DistError) or any(word in str(error).lower() for word in CONNECTION_WORDS)
