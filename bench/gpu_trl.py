"""TRL's update beside ours: the same rows, precision, loss and optimizer, in as many passes as hold as many tokens."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from tempfile import TemporaryDirectory
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "bench")]

import torch  # noqa: E402
from peers import trl  # noqa: E402

from trainer.learn.batch import Row  # noqa: E402
from trainer.policy.settings import UpdateSettings  # noqa: E402

PATH = "MTRL_TRL_PYTHONPATH"
"""Where TRL is carried to: this Python finds it there, beside its own packages."""
PATIENCE_S = 1200.0


def beside(
    model: Path, rows: Sequence[Row], siblings: int, update: UpdateSettings, updates: int, tokens: int
) -> dict[str, Any]:
    """`tokens` are those of all rows. Where TRL is not to be had or fails, the reason is the result."""
    try:
        told = _told(model, rows, siblings, update, updates)
    except (RuntimeError, subprocess.TimeoutExpired) as error:
        return {"trl_problem": str(error)}
    return {
        "trl": told["version"],
        "trl_update_tokens_per_s": tokens / mean(told["steps_s"][1:]),
        "trl_grad_norm": told["grad_norm"],
        "trl_rows_at_once": told["rows_at_once"],
    }


def _told(model: Path, rows: Sequence[Row], siblings: int, update: UpdateSettings, updates: int) -> Mapping[str, Any]:
    at_once = together(len(rows), max(len(row.ids) for row in rows), update.tokens)
    job = {
        "model": str(model),
        "rows": [_row(row) for row in rows],
        "rows_at_once": at_once,
        "n": siblings,
        "updates": updates,
        "lr": update.lr,
        "betas": update.betas,
        "clip": update.clip,
        "threads": torch.get_num_threads(),
    }
    python, env = _reached()
    with TemporaryDirectory() as folder:
        file, out = Path(folder) / "job.json", Path(folder) / "told.json"
        file.write_text(json.dumps(job))
        command = [python, str(ROOT / "bench" / "trl_update.py"), str(file), str(out)]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
        if done.returncode:
            raise RuntimeError(f"TRL ended with {done.returncode}: {done.stderr[-1500:]}")
        return {**json.loads(out.read_text()), "rows_at_once": at_once}


def _row(row: Row) -> dict[str, Any]:
    """TRL has one advantage for all of a rollout; so has the algorithm that it is compared with."""
    taught = [weight > 0 for weight in row.weights]
    worth = {advantage for advantage, one in zip(row.advantages, taught, strict=True) if one}
    if len(worth) != 1:
        raise RuntimeError(f"{row.name} has {len(worth)} advantages, of which TRL takes one")
    return {"ids": list(row.ids), "mask": taught, "advantage": worth.pop()}


def together(rows: int, longest: int, tokens: int) -> int:
    """As many rows as go into one pass with so many tokens, padding included; passes are all of one size."""
    return max(many for many in range(1, rows + 1) if rows % many == 0 and (many == 1 or many * longest <= tokens))


def _reached() -> tuple[str, Mapping[str, str]]:
    env = os.environ | {"HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}
    if carried := os.environ.get(PATH):
        return sys.executable, env | {"PYTHONPATH": carried}
    peer = trl(now=torch.cuda.is_available())
    if peer.problem:
        raise RuntimeError(peer.problem)
    return peer.python, env
