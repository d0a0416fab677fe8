"""The memory that this process takes: for its interpreter and libraries, now, and at most."""

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


def reset_peak_memory() -> bool:
    """From now on, `peak_memory` is that since now; False where the system cannot say."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        return True
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError:
        return False
    return True


def peak_memory() -> int:
    """The most bytes that were in use: of the GPU, with what others have there now; without one, of this process."""
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        return int(total - free - torch.cuda.memory_reserved() + torch.cuda.max_memory_allocated())
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))


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
