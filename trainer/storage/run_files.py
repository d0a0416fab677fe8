"""Reads run.json (settings, model and versions of a run), and reads and writes metrics.jsonl, one line per step.

    {"step": 12, "reward/mean": 0.71, "entropy": 0.32, "time/rolling_out_s": 1.9, ...}

Metric names are area/name. Step 0 holds what was measured before the first step. Non-finite values are written as null
and read as NaN. If the writer is killed in mid-line, the incomplete last line is ignored. A step's line is complete
before the next step begins; resuming from a step removes the lines of later steps. A damaged line is warned about once
and left out, and of several lines of a step the last one counts.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from fnmatch import fnmatchcase
from math import isfinite, nan
from pathlib import Path, PurePath
from typing import Any, Self

from gateway.disk_errors import describe_write_error, require_linked, write_atomically
from gateway.line_file import FileLine, iterate_lines, parse_json_line
from trainer.storage.rollout_file import RunError, resume_hint, warn_once

RUN_LAYOUT: Mapping[str, Mapping[str, str]] = {
    "The run": {
        "run.json": "the resolved settings, the model, versions, git commit, engine, and a hash of the data; `--resume`"
        " compares with it",
        "metrics.jsonl": "a line for each step with all its metrics ([their names](metrics.md)); a value that is not"
        " finite is null",
        "progress.json": "what the run is doing now, training, `eval` or `rollout`, written every second; left by a"
        " process that was killed",
        "rollouts.jsonl": "a line for each rollout: ledger, messages, timing, rewards. Read it with `mtrl-train show`"
        " or `trainer.view.load` in Python",
        "rollouts.jsonl.index": "what `mtrl-train view` searches in, an SQLite file; made anew if it is deleted",
        "credits.jsonl": "the advantage that each token was trained with",
        "blobs/*": "images of the rollouts, each named by its sha256",
        "tapes/*": "with `record: true`, what tools answered from that step on",
        "logs/sglang-*.log": "what an SGLang server printed",
        "logs/rank-*.log": "what a rank printed",
        "logs/*.log": "what a rollout worker printed",
        "best.json": "the step with the highest `eval/greedy`, whose checkpoint is kept beside the latest ones",
        ".lock": "held by the process that writes the run, so that no second one does",
        ".running": "the user code that is running; left by a process that was killed, it names what was",
    },
    "Reporters": {
        "tensorboard/events.out.tfevents.*": "the metrics of each step for TensorBoard, always written:"
        " `tensorboard --logdir runs`. A resumed run adds a file",
        "reports/*": "the run's id at each service that `report` names (`wandb`, `mlflow`, `trackio`), so that a"
        " resumed run goes on there; delete it for a new one",
        "wandb/*": "what Weights & Biases keeps on this machine, with `report: [wandb]`",
    },
    "A checkpoint": {
        "checkpoints/*/state.json": "the step, the position in the data, the size of rollouts.jsonl, and the sha256 of"
        " every other file. It is written last: a folder without it is not resumed from",
        "checkpoints/*/model*.safetensors": "the weights, in the form that `from_pretrained` and SGLang load",
        "checkpoints/*/model.safetensors.index.json": "which file has which weights, of a large model",
        "checkpoints/*/config.json": "the model's configuration",
        "checkpoints/*/generation_config.json": "the model's defaults for generation",
        "checkpoints/*/adapter_model.safetensors": "with `update.lora`, the adapters instead of the weights, for peft",
        "checkpoints/*/adapter_config.json": "with `update.lora`, what the adapters are, and which model they are for",
        "checkpoints/*/optimizer.pt": "the state of the optimizers, and of the critic if there is one",
        "checkpoints/*/chance.pt": "the random states of Python, NumPy and torch",
        "checkpoints/*/tokenizer*": "the tokenizer, so that the folder is a whole model",
        "checkpoints/*/chat_template.jinja": "the chat template",
        "checkpoints/*/special_tokens_map.json": "names of special tokens, if the model has such a file",
        "checkpoints/*/added_tokens.json": "added tokens, if the model has such a file",
        "checkpoints/*/vocab.json": "the vocabulary, if the model has such a file",
        "checkpoints/*/merges.txt": "merges of the tokenizer, if the model has such a file",
        "checkpoints/*/*preprocessor_config.json": "how images are prepared, of a model that sees",
        "checkpoints/*/processor_config.json": "how text and images are put together, of a model that sees",
    },
    "A checkpoint of several ranks": {
        "checkpoints/*/shards/*": "the weights and the optimizer's state, a part of each rank, instead of"
        " model.safetensors and optimizer.pt. Any number of ranks, or one process, resumes from them; `mtrl-train"
        " export` writes a model from them",
        "checkpoints/*/shards/.metadata": "which part is in which file",
        "checkpoints/*/policy.json": "the optimizer steps so far, and the optimizers' settings",
        "checkpoints/.writing-*/*": "a checkpoint that is being written; the next start removes it",
        "checkpoints/.replaced-*/*": "an earlier checkpoint of this step while its successor takes its place",
    },
    "An evaluation": {
        "eval/comparison.json": "success before and after, sampled and greedy, from `mtrl-train eval`. The next one"
        " moves it to `eval-1/`, then `eval-2/`",
        "eval/*/*": "the rollouts of each of the four, a folder like a run's",
    },
}
"""Patterns of paths in a run's folder, by part of the page."""

RUN_NAMES = frozenset(pattern.split("/")[0] for files in RUN_LAYOUT.values() for pattern in files)
"""The files and folders directly in a run's folder."""


def describe_run_file(path: PurePath) -> str | None:
    """What a file of a run's folder holds, by its path in that folder; None for one that is not a run's."""
    name = path.as_posix()
    for files in RUN_LAYOUT.values():
        for pattern, meaning in files.items():
            if fnmatchcase(name, pattern) and (pattern.count("/") == name.count("/") or pattern.endswith("/*")):
                return meaning
    return None


log = logging.getLogger(__name__)

RUN_INFO_FILE = "run.json"


def find_run_folder(folder: Path) -> Path:
    """The folder that holds run.json: this one, or for an evaluation that of the evaluated run."""
    return next(
        (parent for parent in (folder, *folder.absolute().parents[:2]) if (parent / RUN_INFO_FILE).exists()), folder
    )


def read_run_info(folder: Path) -> Mapping[str, Any]:
    """The content of run.json; empty if the run has not started."""
    try:
        info = json.loads((find_run_folder(folder) / RUN_INFO_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return info if isinstance(info, dict) else {}


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
        with self._report_write_errors():
            file.parent.mkdir(parents=True, exist_ok=True)
            self._file = file.open("ab", buffering=0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def truncate_after(self, step: int) -> list[StepMetrics]:
        """Removes the lines of later steps, and damaged ones; returns the remaining metrics, oldest first."""
        remaining = {number: metrics for number, metrics in _read_steps(self.file).items() if number <= step}
        lines = b"".join(dump_metrics(number, _without_step(metrics)) for number, metrics in remaining.items())
        with self._report_write_errors():
            if lines != self.file.read_bytes():
                write_atomically(self.file, lines)
                self._file.close()
                self._file = self.file.open("ab", buffering=0)
        return list(remaining.values())

    def add(self, step: int, metrics: Mapping[str, float]) -> None:
        """Appends a step's metrics. Raises RunError, with nothing appended, if the disk is full."""
        rest = memoryview(dump_metrics(step, metrics))
        with self._report_write_errors():
            start = self._file.seek(0, 2)
            try:
                while rest:
                    rest = rest[self._file.write(rest) :]
                require_linked(self._file.fileno(), self.file)
            except BaseException:  # The next line must not follow half a line.
                with suppress(OSError):
                    self._file.truncate(start)
                raise

    def sync(self) -> None:
        """Waits until all lines are on the disk."""
        with self._report_write_errors():
            os.fsync(self._file.fileno())

    @contextmanager
    def _report_write_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise RunError(describe_write_error(self.file, error, resume_hint(self.file.parent))) from error


def _without_step(metrics: StepMetrics) -> StepMetrics:
    return {name: value for name, value in metrics.items() if name != "step"}
