"""Threads of torch on a CPU: as many as are measured to pay."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any

import torch
from transformers import PreTrainedModel

MIN_PARAMETERS = 20_000_000
"""Smaller models are slower with several threads, and lose little by being deterministic."""
MIN_GAIN = 1.4
"""Threads are used if products are so many times faster with them."""
ROWS, FACTOR, TRIES = 512, 4, 9


def choose_threads(model: PreTrainedModel) -> int:
    """The threads for a model, by products of its width; takes a tenth of a second."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if model.num_parameters() < MIN_PARAMETERS or cores == 1:
        return 1
    embedding: Any = model.get_input_embeddings()
    width = int(embedding.weight.shape[1])
    counts = sorted({1, max(2, cores // 2), cores})
    seconds = {count: _measure(count, width) for count in counts}
    fastest = min(counts, key=lambda count: seconds[count])
    return fastest if seconds[1] >= MIN_GAIN * seconds[fastest] else 1


def _measure(threads: int, width: int) -> float:
    """The median of some products, in seconds: on a busy machine, threads wait for each other."""
    inputs, weights = torch.ones(ROWS, width), torch.ones(width, FACTOR * width)
    with use_threads(threads):
        seconds = []
        for _ in range(TRIES):
            began = time.perf_counter()
            torch.mm(inputs, weights)
            seconds.append(time.perf_counter() - began)
    return median(seconds)


@contextmanager
def use_threads(count: int) -> Iterator[None]:
    """Products of this thread use so many threads in the block."""
    before = torch.get_num_threads()
    if count == before:
        yield
        return
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
