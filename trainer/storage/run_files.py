"""Reads run.json (settings, model and versions of a run), and reads and writes metrics.jsonl, one line per step.

    {"step": 12, "reward/mean": 0.71, "entropy": 0.32, "time/rolling_out_s": 1.9, ...}

Metric names are area/name. Step 0 holds what was measured before the first step. Non-finite values are written as null
and read as NaN. If the writer is killed in mid-line, the incomplete last line is ignored. A step's line is complete
before the next step begins; resuming from a step removes the lines of later steps. A damaged line is warned about once
and left out, and of several lines of a step the last one counts.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import AbstractContextManager
from math import isfinite, nan
from pathlib import Path
from typing import Any, Self, TypeVar

from pydantic import BaseModel, ValidationError

from gateway.disk_errors import write_atomically
from gateway.errors import ConfigError
from gateway.line_file import FileLine, iterate_lines, parse_json_line
from trainer.pretrained import read_json
from trainer.storage.rollout_file import RunError, append_line, reporting_write_errors, resume_hint, warn_once

RUN_NAMES = frozenset({
    "run.json", "metrics.jsonl", "progress.json", "rollouts.jsonl", "rollouts.jsonl.index", "credits.jsonl",
    "best.json", ".lock", "blobs", "tapes", "logs", "tensorboard", "reports", "wandb", "checkpoints",
    "eval", "notes.json",
})  # fmt: skip
"""The files and folders directly in a run's folder; docs/reference/run-folder.md says what they hold."""

RUN_INFO_FILE = "run.json"
Settings = TypeVar("Settings", bound=BaseModel)


def find_run_folder(folder: Path) -> Path:
    """The folder that holds run.json: this one, or for an evaluation that of the evaluated run."""
    return next(
        (parent for parent in (folder, *folder.absolute().parents[:2]) if (parent / RUN_INFO_FILE).exists()), folder
    )


def require_run(folder: Path) -> None:
    """Raises ConfigError if there is no such folder."""
    if not os.path.isdir(folder):
        remedy = "name a folder that `mtrl-train --out` or `mtrl-train rollout --out` wrote"
        raise ConfigError("there is no such run", file=folder, remedy=remedy)


def read_run_info(folder: Path) -> Mapping[str, Any]:
    """The content of run.json; empty if the run has not started."""
    return read_json(find_run_folder(folder) / RUN_INFO_FILE)


def load_run_settings(run: Path, kind: type[Settings], command: str) -> Settings:
    """The settings that a run was made with. `command` is what makes such runs."""
    try:
        info = json.loads((run / RUN_INFO_FILE).read_text(encoding="utf-8"))
        return kind.model_validate(info["settings"])
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        field = ".".join(map(str, ("settings", *first["loc"])))
        problem = f"a setting of the run does not fit this version: {first['msg']}"
        raise ConfigError(problem, file=run / RUN_INFO_FILE, field=field, remedy="correct it, or remove it") from error
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        problem = f"not a run of `{command}` ({type(error).__name__})"
        remedy = f"name a folder that `{command} --out` made"
        raise ConfigError(problem, file=run, remedy=remedy) from error


def write_json(file: Path, value: object, remedy: str) -> None:
    """Writes a file of a run, whole or not at all. Raises RunError with what to do next."""
    with reporting_write_errors(file, remedy):
        write_atomically(file, (json.dumps(value, indent=2) + "\n").encode())


METRICS_FILE = "metrics.jsonl"
LOGS_FOLDER = "logs"
"""Where servers, ranks and rollout workers of a run write what they print."""
StepMetrics = dict[str, float]
"""The metrics of one step, with its number as `step`."""


def dump_metrics(step: int, metrics: Mapping[str, float]) -> bytes:
    """The metrics of a step as a line with its line end."""
    values = {name: value if isfinite(value) else None for name, value in metrics.items()}
    return json.dumps({"step": step, **values}).encode() + b"\n"


def read_metrics(file: Path) -> list[StepMetrics]:
    """The metrics of all steps, oldest first; warns about damaged lines."""
    try:
        return list(_read_steps(file).values())
    except OSError as error:
        raise RunError(
            f"{file}: cannot be read ({error.strerror})\n"
            "  remedy: name the folder of a training run; it has this file once the first step has ended"
        ) from error


def _read_steps(file: Path) -> dict[int, StepMetrics]:
    """The metrics by step, in order. A step that stands there twice counts once, as it was made last."""
    steps: dict[int, StepMetrics] = {}
    with file.open("rb") as stream:
        for line in iterate_lines(stream):
            if not line.is_complete:
                break
            try:
                metrics = _parse_line(line)
            except (ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
                warn_once(
                    f"{file}: line {line.number} is damaged ({type(error).__name__}: {error}) and is left out: "
                    "the metrics of its step are lost, the others are not affected"
                )
            else:
                steps[int(metrics["step"])] = metrics
    return {step: steps[step] for step in sorted(steps)}


def _parse_line(line: FileLine) -> StepMetrics:
    if line.is_too_long:
        raise ValueError("it is too long")
    values = parse_json_line(line.data)
    return {"step": int(values["step"])} | {
        name: nan if value is None else float(value) for name, value in values.items() if name != "step"
    }


class MetricsWriter:
    """Appends one line per step to metrics.jsonl."""

    def __init__(self, file: Path) -> None:
        self.file = file
        with self._reporting_errors():
            file.parent.mkdir(parents=True, exist_ok=True)
            self._file = file.open("ab", buffering=0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def truncate_after(self, step: int) -> list[StepMetrics]:
        """Removes the lines of later steps, and damaged ones; returns the remaining metrics, oldest first."""
        remaining = {number: metrics for number, metrics in _read_steps(self.file).items() if number <= step}
        lines = b"".join(dump_metrics(number, metrics) for number, metrics in remaining.items())
        with self._reporting_errors():
            if lines != self.file.read_bytes():
                write_atomically(self.file, lines)
                self._file.close()
                self._file = self.file.open("ab", buffering=0)
        return list(remaining.values())

    def add(self, step: int, metrics: Mapping[str, float]) -> None:
        """Appends a step's metrics. Raises RunError, with nothing appended, if the disk is full."""
        with self._reporting_errors():
            append_line(self._file, dump_metrics(step, metrics))

    def sync(self) -> None:
        """Waits until all lines are on the disk."""
        with self._reporting_errors():
            os.fsync(self._file.fileno())

    def _reporting_errors(self) -> AbstractContextManager[None]:
        return reporting_write_errors(self.file, resume_hint(self.file.parent))
