"""Runs TRL's update on the rows of ours: same precision, loss and optimizer, micro-batches of as many tokens."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "bench")]

import torch  # noqa: E402
from peers import trl  # noqa: E402

from trainer.algorithms.packing import BatchRow  # noqa: E402
from trainer.policy.settings import UpdateSettings  # noqa: E402

PYTHON_VARIABLE = "MTRL_TRL_PYTHON"
"""A Python that has TRL, for machines without a network."""
TIMEOUT_S = 300.0


def measure_trl_update(  # noqa: PLR0913 - what is measured, and how
    model: Path,
    rows: Sequence[BatchRow],
    siblings: int,
    update: UpdateSettings,
    updates: int,
    timeout_s: float = TIMEOUT_S,
    *,
    counts_operations: bool = False,
) -> Mapping[str, Any]:
    """TRL's version, seconds of each step by the clock and of all cores, and gradient norm; if they are to be counted,
    the operations of the second update.

    Raises RuntimeError if it cannot be installed or fails.
    """
    rows_at_once = micro_batch_rows(len(rows), max(len(row.ids) for row in rows), update.micro_batch_tokens)
    job = {
        "model": str(model),
        "rows": [_row_to_json(row) for row in rows],
        "rows_at_once": rows_at_once,
        "n": siblings,
        "updates": updates,
        "lr": update.lr,
        "betas": update.betas,
        "clip": update.max_grad_norm,
        "threads": torch.get_num_threads(),
        "counts_operations": counts_operations,
    }
    python, env = find_trl()
    with TemporaryDirectory() as folder:
        file, out = Path(folder) / "job.json", Path(folder) / "result.json"
        file.write_text(json.dumps(job))
        command = [python, str(ROOT / "bench" / "trl_update.py"), str(file), str(out)]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=timeout_s, check=False)
        if done.returncode:
            raise RuntimeError(f"TRL ended with {done.returncode}: {done.stderr[-1500:]}")
        return {**json.loads(out.read_text()), "rows_at_once": rows_at_once}


def _row_to_json(row: BatchRow) -> dict[str, Any]:
    """A row for TRL, which has one advantage for a whole rollout; so has the algorithm that it is compared with."""
    mask = [weight > 0 for weight in row.weights]
    advantages = {advantage for advantage, is_trained in zip(row.advantages, mask, strict=True) if is_trained}
    if len(advantages) != 1:
        raise RuntimeError(f"{row.name} has {len(advantages)} advantages, of which TRL takes one")
    return {"ids": list(row.ids), "mask": mask, "advantage": advantages.pop()}


def micro_batch_rows(rows: int, longest: int, max_tokens: int) -> int:
    """The most rows of a micro-batch with up to `max_tokens`, padding included; all micro-batches are of one size."""
    sizes = [size for size in range(1, rows + 1) if rows % size == 0]
    return max(size for size in sizes if size == 1 or size * longest <= max_tokens)


def find_trl() -> tuple[str, Mapping[str, str]]:
    """The Python that has TRL, and its environment variables."""
    env = os.environ | {"HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}
    if python := os.environ.get(PYTHON_VARIABLE):
        return python, env
    peer = trl(install=torch.cuda.is_available())
    if peer.problem:
        raise RuntimeError(peer.problem)
    return peer.python, env
