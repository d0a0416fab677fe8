"""Reports metrics to TensorBoard, Weights & Biases, MLflow and trackio, each in a thread that cannot stop training.

TensorBoard is always reported to, the others if `report` names them. A reporter that fails or falls behind is warned
about once and then skipped: metrics.jsonl has everything.
"""

from __future__ import annotations

import importlib
import logging
import os
import secrets
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import isfinite
from pathlib import Path
from queue import Full, Queue
from threading import Thread
from typing import Any, Protocol

from gateway.errors import ConfigError, format_error
from gateway.user_code import run_contained
from trainer.rollout.settings import flatten_settings

log = logging.getLogger(__name__)

TENSORBOARD = "tensorboard"
"""The reporter's name, and its folder within the run's."""
PROJECT = "mtrl"
"""The project or experiment of runs, unless the environment names another."""
MAX_QUEUED = 1000
"""Steps that a reporter may be behind before it is given up."""
CLOSE_S = 15.0
"""Seconds at the end for all reporters together to receive what is queued."""


class Reporter(Protocol):
    """Receives the metrics of each step."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class ReportedRun:
    """The run that is reported, and its ids at the reporters."""

    name: str
    folder: Path
    settings: Mapping[str, Any]

    def read_id(self, reporter: str) -> str | None:
        """The run's id at a reporter, if an earlier start saved one: a resumed run continues there."""
        file = self._id_file(reporter)
        return file.read_text(encoding="utf-8").strip() if file.exists() else None

    def save_id(self, reporter: str, run_id: str) -> str:
        self._id_file(reporter).parent.mkdir(parents=True, exist_ok=True)
        self._id_file(reporter).write_text(run_id + "\n", encoding="utf-8")
        return run_id

    def _id_file(self, reporter: str) -> Path:
        return self.folder / "reports" / reporter


class TensorBoardWriter:
    """Writes an event file. Every start of a run writes its own; steps that are repeated replace earlier ones."""

    def __init__(self, folder: Path) -> None:
        # Imported here, in the reporter's thread: it takes a quarter of a second.
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # type: ignore[import-untyped]
        from tensorboard.summary.writer.record_writer import RecordWriter  # type: ignore[import-untyped]

        folder.mkdir(parents=True, exist_ok=True)
        # TensorBoard reads files by name and never goes back: after a clock is set back, a new file is still the last.
        seconds = max(int(time.time()), 1 + max(map(_file_seconds, folder.glob("events.out.tfevents.*")), default=0))
        name = f"events.out.tfevents.{seconds:010}.{socket.gethostname()}.{os.getpid()}"
        self._event, self._start = Event, SessionLog(status=SessionLog.START)
        self._writer = RecordWriter((folder / name).open("ab", buffering=0))
        self._write(file_version="brain.Event:2")
        self._has_started = False

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if not self._has_started:
            self._write(step=step, session_log=self._start)
            self._has_started = True
        values = [{"tag": name, "simple_value": value} for name, value in metrics.items()]
        self._write(step=step, summary={"value": values})

    def close(self) -> None:
        self._writer.close()

    def _write(self, **fields: Any) -> None:
        self._writer.write(self._event(wall_time=time.time(), **fields).SerializeToString())


def _file_seconds(file: Path) -> int:
    """The seconds in the name of an event file."""
    digits = file.name.split(".")[3]
    return int(digits) if digits.isdigit() else 0


class WandbReporter:
    """Logs to a run of W&B, or of trackio, which has the same interface."""

    def __init__(self, run: Any) -> None:
        self._run = run

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()


class MlflowReporter:
    """Logs to MLflow. Its active run belongs to the thread, and parameters cannot be changed once logged."""

    def __init__(self, mlflow: Any, reported_run: ReportedRun) -> None:
        self._mlflow, run_id = mlflow, reported_run.read_id("mlflow")
        if not {"MLFLOW_EXPERIMENT_NAME", "MLFLOW_EXPERIMENT_ID"} & os.environ.keys():
            mlflow.set_experiment(PROJECT)
        run = mlflow.start_run(run_id=run_id, run_name=reported_run.name)
        if run_id is None:
            reported_run.save_id("mlflow", run.info.run_id)
            flat = flatten_settings(reported_run.settings)
            mlflow.log_params({name: value for name, value in flat.items() if value != {}})

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._mlflow.log_metrics(dict(metrics), step=step)

    def close(self) -> None:
        self._mlflow.end_run()


def _wandb(wandb: Any, reported_run: ReportedRun) -> Reporter:
    run_id = reported_run.read_id("wandb") or reported_run.save_id("wandb", secrets.token_hex(4))
    return WandbReporter(
        wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            id=run_id,
            name=reported_run.name,
            resume="allow",
            config=dict(reported_run.settings),
            dir=str(reported_run.folder),
        )
    )


def _trackio(trackio: Any, reported_run: ReportedRun) -> Reporter:
    """trackio identifies runs by name, so the name must be unique."""
    name = reported_run.read_id("trackio") or reported_run.save_id(
        "trackio", f"{reported_run.name}-{secrets.token_hex(4)}"
    )
    settings = dict(reported_run.settings)
    return WandbReporter(trackio.init(project=PROJECT, name=name, resume="allow", config=settings))


REPORTERS: Mapping[str, Callable[[Any, ReportedRun], Reporter]] = {
    "wandb": _wandb,
    "mlflow": MlflowReporter,
    "trackio": _trackio,
}


class Reporters:
    """All reporters of a run."""

    def __init__(
        self,
        names: Sequence[str],
        folder: Path,
        settings: Mapping[str, Any],
        run_name: str,
        warn: Callable[[str], None] = log.warning,
    ) -> None:
        """Raises ConfigError if a package is missing; later problems go to `warn`, from any thread."""
        reported_run = ReportedRun(run_name, folder, settings)
        packages = import_packages(names)
        self._threads = [_ReporterThread(TENSORBOARD, lambda: TensorBoardWriter(folder / TENSORBOARD), warn)]
        for name, package in packages.items():
            self._threads.append(_ReporterThread(name, partial(REPORTERS[name], package, reported_run), warn))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Queues a step's metrics and returns at once. Values that are not finite are left out."""
        finite = {name: value for name, value in metrics.items() if isfinite(value)}
        for thread in self._threads:
            thread.log(step, finite)

    def close(self) -> None:
        for thread in self._threads:
            thread.end()
        deadline = time.monotonic() + CLOSE_S
        for thread in self._threads:
            thread.join(deadline - time.monotonic())


class _ReporterThread:
    """A reporter and its thread."""

    def __init__(self, name: str, open_reporter: Callable[[], Reporter], warn: Callable[[str], None]) -> None:
        self._name, self._open_reporter, self._warn = name, open_reporter, warn
        self._queue: Queue[tuple[int, Mapping[str, float]] | None] = Queue(MAX_QUEUED)
        self._is_off = False
        self._thread = Thread(target=self._run, name=f"report to {name}", daemon=True)
        self._thread.start()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if not self._is_off:
            self._put((step, metrics))

    def end(self) -> None:
        if not self._is_off:
            self._put(None)

    def join(self, timeout_s: float) -> None:
        if self._is_off:
            return
        self._thread.join(max(0.0, timeout_s))
        if self._thread.is_alive():
            self._give_up(f"has not received everything within {CLOSE_S:g} s")

    def _put(self, item: tuple[int, Mapping[str, float]] | None) -> None:
        try:
            self._queue.put_nowait(item)
        except Full:
            self._give_up(f"is {MAX_QUEUED} steps behind")

    def _run(self) -> None:
        try:
            run_contained(self._report)
        except Exception as error:  # boundary: errors of other packages must not reach the training
            self._give_up(f"failed ({format_error(error)})")

    def _report(self) -> None:
        reporter = self._open_reporter()
        while (item := self._queue.get()) is not None:
            reporter.log(*item)
        reporter.close()

    def _give_up(self, reason: str) -> None:
        self._is_off = True
        self._warn(f"{self._name} {reason} and gets no more metrics of this run; metrics.jsonl has everything")


def import_packages(names: Sequence[str]) -> dict[str, Any]:
    """Imports the packages of the named reporters. Raises ConfigError if one is missing."""
    return {name: _import_package(name) for name in dict.fromkeys(names)}


def _import_package(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(
            f"the package {name} cannot be imported ({error})",
            field="report",
            remedy=f"pip install {name}, or leave it out",
        ) from error
