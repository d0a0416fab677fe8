"""Seconds of a training step with 1, 2 and 4 ranks, beside a floor: what the cores allow without any exchange.

The floor of N ranks is the time in which N processes at once, which know nothing of each other, each train on an N-th
of the rows. Where there are fewer cores than ranks, no program could be faster than that by adding ranks.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from statistics import median
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT)]

import torch  # noqa: E402
from transformers import Qwen3ForCausalLM  # noqa: E402

from tests.trainer.distributed.rank_pools import make_updater, running_ranks  # noqa: E402
from tests.trainer.policy.tiny_policies import tiny_model  # noqa: E402
from trainer.algorithms.settings import AlgorithmSettings  # noqa: E402
from trainer.algorithms.train_batch import TrainBatch, TrainSequence  # noqa: E402
from trainer.policy.policy import Policy  # noqa: E402
from trainer.policy.settings import UpdateSettings  # noqa: E402
from trainer.policy.update import PolicyUpdater  # noqa: E402

GROUPS, SIBLINGS, OPENING, WRITTEN = 8, 4, 48, 144
"""Groups of a step, rows of a group, and a row's tokens in common with its siblings and of its own."""
VOCABULARY = 50
WAIT_S = 300.0
START = "start"


@dataclass(frozen=True, slots=True)
class RankPace:
    """A training step with so many ranks."""

    ranks: int
    step_s: float
    floor_s: float

    @property
    def ratio(self) -> float:
        """How close the ranks come to what the cores allow; 1 would be an exchange that costs nothing."""
        return self.floor_s / self.step_s


def measure_ranks(sizes: Sequence[int], steps: int) -> list[RankPace]:
    """Measures every number of ranks, and its floor right after it."""
    torch.set_num_threads(1)
    with TemporaryDirectory(prefix="mtrl-ranks-") as folder:
        model = save_model(Path(folder) / "model")
        return [
            RankPace(
                size, measure_step(model, Path(folder) / str(size), size, steps), measure_floor(model, size, steps)
            )
            for size in sizes
        ]


def save_model(folder: Path) -> Path:
    """A model large enough that a step takes longer than its messages."""
    config = tiny_model(tie_word_embeddings=True).config
    config.hidden_size, config.intermediate_size = 128, 512
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


def make_batch(policy: Policy, parts: int = 1, part: int = 0) -> TrainBatch:
    """All groups, or those of one of so many parts; siblings have their opening in common."""
    draw, sequences, owners = Random(0), [], []
    for group in range(GROUPS):
        opening = [draw.randrange(VOCABULARY) for _ in range(OPENING)]
        for _ in range(SIBLINGS):
            ids = opening + [draw.randrange(VOCABULARY) for _ in range(WRITTEN)]
            if group % parts != part:
                continue
            mask = [False] * OPENING + [True] * WRITTEN
            logprobs = [0.0] * OPENING + policy.compute_logprobs(ids)[OPENING - 1 :]
            turns = [-1] * OPENING + [0] * WRITTEN
            index = len(sequences)
            row = ids, mask, logprobs, [float(is_policy) for is_policy in mask], turns
            sequences.append(TrainSequence(f"{group}/{index}", index, *row))
            owners.append(group // parts)
    names = tuple(sequence.name for sequence in sequences)
    rewards = tuple(float(index % SIBLINGS) for index in range(len(sequences)))
    return TrainBatch(tuple(sequences), names, tuple(owners), rewards, ((0.0,),) * len(sequences))


def measure_step(model: Path, logs: Path, size: int, steps: int) -> float:
    """The median seconds of a step on all rows."""
    if size == 1:
        alone = Policy.load(model, UpdateSettings())
        return time_steps(PolicyUpdater(alone, AlgorithmSettings(), exact=True), make_batch(alone), steps)
    with running_ranks(size, logs, timeout_s=WAIT_S) as channel:
        policy, updater = make_updater(channel, model, AlgorithmSettings(), UpdateSettings())
        return time_steps(updater, make_batch(policy), steps)


def time_steps(updater: PolicyUpdater, batch: TrainBatch, steps: int) -> float:
    return median(list(_times(updater, batch, steps))[1:])


def _times(updater: PolicyUpdater, batch: TrainBatch, steps: int) -> Iterator[float]:
    for _ in range(steps + 1):
        began = time.perf_counter()
        updater.train_step(batch)
        yield time.perf_counter() - began


def measure_floor(model: Path, size: int, steps: int) -> float:
    """The median seconds of a step of the slowest of so many processes that run at once, each on its part."""
    command = [sys.executable, __file__, str(model), str(size), str(steps)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    children = [
        subprocess.Popen(
            [*command, str(part)], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for part in range(size)
    ]
    try:
        for child in children:
            assert child.stdout and child.stdout.readline().strip() == START
        for child in children:
            assert child.stdin
            child.stdin.write("\n")
            child.stdin.flush()
        return max(float(child.communicate(timeout=WAIT_S)[0]) for child in children)
    finally:
        for child in children:
            child.kill()
            child.wait()


def run_part(model: str, size: str, steps: str, part: str) -> None:
    """One process of the floor: starts when it is told to, so that all run at once."""
    torch.set_num_threads(1)
    policy = Policy.load(Path(model), UpdateSettings())
    updater, batch = PolicyUpdater(policy, AlgorithmSettings(), exact=True), make_batch(policy, int(size), int(part))
    print(START, flush=True)
    sys.stdin.readline()
    print(time_steps(updater, batch, int(steps)), flush=True)


if __name__ == "__main__":
    run_part(*sys.argv[1:])
