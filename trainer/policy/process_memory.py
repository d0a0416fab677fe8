"""The memory that a process takes for its interpreter and libraries, measured in this process."""

from __future__ import annotations

import ctypes
import os
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

TRIMMED_WEIGHTS = 2**24
"""From so many weights on, the memory that the heap would keep between passes is worth the 20 ms of giving it back."""


def resident_memory() -> int:
    """Bytes that this process has in memory; 0 where the system does not say."""
    try:
        return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0


def measure_floor(*, lora: bool) -> int:
    """Bytes that this process has in memory after all code that an update needs was used once, on a few numbers."""
    _use_libraries(lora)
    return resident_memory()


@lru_cache
def _use_libraries(lora: bool) -> None:
    """Reads the code of products, their gradients, AdamW and adapters from the disk, as the first step would."""
    weight = torch.ones(64, 64, requires_grad=True)
    loss = checkpoint(lambda rows: (rows @ rows).log_softmax(-1).sum(), weight, use_reentrant=False)
    loss.backward()
    optimizer: torch.optim.Optimizer = torch.optim.AdamW([weight])
    optimizer.step()
    torch.bmm(torch.ones(2, 16, 64), torch.ones(2, 64, 64))
    if lora and find_spec("peft"):
        import peft  # noqa: F401


def trim_heap(model: nn.Module) -> None:
    """Gives freed memory that glibc keeps back to the system, if the model is large and on the CPU."""
    parameters = list(model.parameters())
    if parameters[0].device.type != "cpu" or sum(value.numel() for value in parameters) < TRIMMED_WEIGHTS:
        return
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # Other C libraries have none.
    if malloc_trim is not None:
        malloc_trim(0)
