"""Plans how trainer and engine share one GPU: side by side, or taking turns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch

from trainer.engines import FIRST_GPU_FLAG, can_use_sglang, leave_gpus, read_flag
from trainer.policy.memory_parts import GIB, MemoryPart, MemoryPlan
from trainer.policy.memory_plan import is_synchronous, plan_memory
from trainer.rollout.settings import BaseRolloutSettings, ServingSettings

SERVER_SIZES = ((20, 2048, 8), (35, 4096, 48), (60, 4096, 32), (160, 8192, 256), (10**6, 16384, 512))
"""SGLang's defaults for GPUs below so many GiB: tokens of a prefill, and the largest batch with a CUDA graph."""
LARGE_GPU, LARGE_RESERVE = 60 * GIB, 10 * GIB
"""On GPUs above this size, SGLang keeps at least so much free."""
MAX_FRACTION = 0.9
"""The largest share of the memory that a server is given."""
MEMORY_FRACTION_FLAG = "--mem-fraction-static"
MEMORY_SAVER_FLAG = "--enable-memory-saver"


@dataclass(frozen=True, slots=True)
class Placement:
    """How trainer and engine share a GPU: `together` takes turns, `beside` holds both at once."""

    kind: Literal["together", "beside"]
    plan: MemoryPlan
    """What has to fit at the peak."""
    fraction: float | None = None
    """The share of the memory free at the server's start that it may take; None if no server of ours is on the GPU."""

    def __str__(self) -> str:
        if self.fraction is None:
            reason = "no server started by this run shares a GPU with the trainer"
            return f"{self.plan}\nplacement: side by side; {reason}"
        turns = "taking turns, the engine releases its memory during each update"
        how = turns if self.kind == "together" else "side by side"
        return f"{self.plan}\nplacement: {how}; the server may take {self.fraction:.0%} of the GPU memory then free"

    def apply_to(self, serving: ServingSettings) -> ServingSettings:
        """Settings with the server flags of this placement; flags that the operator set win."""
        if self.fraction is None:
            return serving
        options = serving.options
        if MEMORY_FRACTION_FLAG not in options:
            options = (*options, MEMORY_FRACTION_FLAG, f"{self.fraction:.3f}")
        if self.kind == "together" and MEMORY_SAVER_FLAG not in options:
            options = (*options, MEMORY_SAVER_FLAG)
        return serving.model_copy(update={"placement": self.kind, "options": options})


def plan_placement(
    settings: BaseRolloutSettings,
    folder: Path,
    available: int | None = None,
    *,
    shares_gpu: bool,
    shards: int = 1,
    ranks: int = 1,
) -> Placement:
    """Plans how a GPU is shared. The plan may not fit.

    `shards` and `ranks` are as in `plan_memory`. `shares_gpu`: whether a server of this run is on a trainer's GPU.
    """
    everything = plan_memory(settings, folder, available, shards=shards, ranks=ranks)
    if not shares_gpu:
        return Placement("beside", everything)
    overhead = MemoryPart(
        "the server's activations and CUDA graphs", server_reserve(settings.serving.options, everything.available)
    )
    engine, training = [*everything.parts[:2], overhead], everything.parts[2:]
    resident = [part for part in training if not part.is_transient]
    available = everything.available
    beside = MemoryPlan((*engine, *training), available)
    while_generating = MemoryPlan((*engine, *resident), available)
    published = replace(engine[0], during=("publishing",))  # It takes its weights back to be given new ones.
    while_updating = MemoryPlan((overhead, published, *training), available)
    turns = max(while_generating, while_updating, key=lambda plan: plan.needed)
    requested = settings.serving.placement
    together = requested == "together" or (requested == "auto" and not beside.fits and is_synchronous(settings))
    plan = turns if together else beside
    loaded = sum(part.size for part in training[:1])
    kept = MemoryPlan(tuple(resident if together else training), available).needed - loaded + overhead.size
    fraction = min(MAX_FRACTION, 1 - kept / (available - loaded)) if plan.fits else 0.0
    return Placement("together" if together else "beside", plan, fraction)


def server_reserve(options: Sequence[str], memory: int) -> int:
    """What SGLang 0.5 leaves free besides weights, keys and values where no flag says how much, by its own formula."""
    tokens, batch = next(sizes for limit, *sizes in SERVER_SIZES if memory < limit * GIB)
    tokens = max(2048, read_flag(options, tokens, "--chunked-prefill-size"))
    batch = read_flag(options, batch, "--cuda-graph-max-bs")
    reserve = int((512 + 1.5 * tokens + 2 * batch) * 2**20)
    return max(reserve, LARGE_RESERVE) if memory > LARGE_GPU else reserve


def shares_gpu_with_server(settings: BaseRolloutSettings, trainer_gpus: int) -> bool:
    """Whether a server that this run starts is on one of the first `trainer_gpus` GPUs, on which ranks train."""
    if not torch.cuda.is_available():
        return False
    if read_flag(leave_gpus(settings.serving, trainer_gpus).options, 0, FIRST_GPU_FLAG) >= trainer_gpus:
        return False
    return settings.engine == "sglang" or (settings.engine == "auto" and can_use_sglang())
