"""Seeds, saves and restores the global random states. Our own sampling does not use them; users' plug-ins may."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy
import torch

STATE_FILE_NAME = "chance.pt"


def seed_all(seed: int) -> None:
    """Seeds Python's, NumPy's and torch's global generators."""
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def save_state(folder: Path) -> None:
    """Writes the states of all global generators into a checkpoint's folder."""
    name, keys, *rest = numpy.random.get_state(legacy=True)
    state: dict[str, Any] = {"python": random.getstate(), "numpy": (name, numpy.asarray(keys).tolist(), *rest)}
    state |= {"torch": torch.get_rng_state(), "cuda": torch.cuda.get_rng_state_all()}
    torch.save(state, folder / STATE_FILE_NAME)


def restore_state(folder: Path) -> None:
    """Restores the states that `save_state` wrote. GPUs that did not exist then keep their state."""
    state: dict[str, Any] = torch.load(folder / STATE_FILE_NAME, weights_only=True, map_location="cpu")
    random.setstate(state["python"])
    name, keys, *rest = state["numpy"]
    numpy.random.set_state((name, numpy.array(keys, dtype=numpy.uint32), *rest))
    torch.set_rng_state(state["torch"])
    for device, device_state in zip(range(torch.cuda.device_count()), state["cuda"], strict=False):
        torch.cuda.set_rng_state(device_state, device)
