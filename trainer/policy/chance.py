"""Generators that are everyone's: ours draw by name and need none, a plug-in of the user's own may draw from these."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy
import torch

NAME = "chance.pt"


def begin(seed: int) -> None:
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def save(folder: Path) -> None:
    name, words, *rest = numpy.random.get_state(legacy=True)
    state: dict[str, Any] = {"python": random.getstate(), "numpy": (name, numpy.asarray(words).tolist(), *rest)}
    state |= {"torch": torch.get_rng_state(), "cuda": torch.cuda.get_rng_state_all()}
    torch.save(state, folder / NAME)


def resume(folder: Path) -> None:
    """As they stood when `save` was asked. GPUs that were not there then begin as they like."""
    state: dict[str, Any] = torch.load(folder / NAME, weights_only=True, map_location="cpu")
    random.setstate(state["python"])
    name, words, *rest = state["numpy"]
    numpy.random.set_state((name, numpy.array(words, dtype=numpy.uint32), *rest))
    torch.set_rng_state(state["torch"])
    for device, one in zip(range(torch.cuda.device_count()), state["cuda"], strict=False):
        torch.cuda.set_rng_state(one, device)
