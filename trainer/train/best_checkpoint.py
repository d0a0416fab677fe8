"""Remembers which checkpoint of a run is the best by greedy evaluation, so that it is kept beside the latest ones."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from gateway.disk_errors import write_atomically

BEST_FILE = "best.json"
METRIC = "eval/greedy"
TASKS_METRIC, LOST_METRIC = "eval/tasks", "eval/lost"
MIN_SCORED = 0.9
"""The share of an evaluation's tasks that must be scored: the few that an outage leaves may be the easy ones."""


def measured_value(metrics: Mapping[str, float]) -> float | None:
    """An evaluation's success, if nearly all of its tasks were scored, so that it may be compared with others."""
    scored, lost = metrics.get(TASKS_METRIC, 0.0), metrics.get(LOST_METRIC, 0.0)
    return metrics.get(METRIC) if scored and scored >= MIN_SCORED * (scored + lost) else None


class BestCheckpoint:
    """The step with the highest `eval/greedy` so far, and its value. Step 0 is the model before training."""

    def __init__(self, run: Path, step: int = 0) -> None:
        """`step` is the one that the run goes on from: what came after it is measured again."""
        self.file, self.step, self.value = run / BEST_FILE, 0, -1.0
        try:
            saved = json.loads(self.file.read_text(encoding="utf-8"))
            best_step, value = int(saved["step"]), float(saved[METRIC])
        except (OSError, ValueError, KeyError, TypeError):
            return
        if 0 < best_step <= step or (step and not best_step):
            self.step, self.value = best_step, value

    def is_improved_by(self, value: float | None) -> bool:
        """Whether an evaluation is better than all before."""
        return value is not None and value > self.value

    def record(self, step: int, value: float) -> None:
        """Makes this step the best; its checkpoint is on the disk."""
        self.step, self.value = step, value
        write_atomically(self.file, (json.dumps({"step": step, METRIC: value}) + "\n").encode())
