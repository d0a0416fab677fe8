"""Whoever else is told the metrics may be slow, full or down: it is told beside the training and never stops it.

TensorBoard is always told; the others where they are asked for. Each has a thread of its own, which it holds up in
place of the run. One that fails is warned of once, and then left alone: metrics.jsonl has everything.
"""

from __future__ import annotations

import importlib
import logging
import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from queue import Full, Queue
from threading import Thread
from typing import Any, Protocol

from gateway.errors import ConfigError
from trainer.config import flat
from trainer.train.events import Events

log = logging.getLogger(__name__)

TENSORBOARD = "tensorboard"
"""The folder of its files within the run's, and its name among the reporters."""
PROJECT = "mtrl"
"""Where runs are found, unless the environment names another project or experiment."""
BEHIND = 1000
"""Steps that a reporter may be behind, before it is given up."""
LEAVE_S = 15.0
"""At the end, for all of them together to hear what is left."""


class Reporter(Protocol):
    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class About:
    """The run that is told of."""

    name: str
    folder: Path
    settings: Mapping[str, Any]

    def known(self, reporter: str) -> str | None:
        """Its id there, where an earlier start has told of it: one that goes on is no second run."""
        file = self._file(reporter)
        return file.read_text(encoding="utf-8").strip() if file.exists() else None

    def keep(self, reporter: str, name: str) -> str:
        self._file(reporter).parent.mkdir(parents=True, exist_ok=True)
        self._file(reporter).write_text(name + "\n", encoding="utf-8")
        return name

    def _file(self, reporter: str) -> Path:
        return self.folder / "reports" / reporter


class Logged:
    """W&B's run, and trackio's, which took it for its pattern."""

    def __init__(self, run: Any) -> None:
        self._run = run

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()


class Mlflow:
    """Its active run is that of the thread, and a parameter that is told once never changes."""

    def __init__(self, mlflow: Any, about: About) -> None:
        self._mlflow, known = mlflow, about.known("mlflow")
        if not {"MLFLOW_EXPERIMENT_NAME", "MLFLOW_EXPERIMENT_ID"} & os.environ.keys():
            mlflow.set_experiment(PROJECT)
        run = mlflow.start_run(run_id=known, run_name=about.name)
        if known is None:
            about.keep("mlflow", run.info.run_id)
            mlflow.log_params({name: value for name, value in flat(about.settings).items() if value != {}})

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._mlflow.log_metrics(dict(metrics), step=step)

    def close(self) -> None:
        self._mlflow.end_run()


def _wandb(wandb: Any, about: About) -> Reporter:
    run = about.known("wandb") or about.keep("wandb", secrets.token_hex(4))
    project, settings = os.environ.get("WANDB_PROJECT", PROJECT), dict(about.settings)
    return Logged(
        wandb.init(project=project, id=run, name=about.name, resume="allow", config=settings, dir=str(about.folder))
    )


def _trackio(trackio: Any, about: About) -> Reporter:
    """Runs are told apart by name alone."""
    name = about.known("trackio") or about.keep("trackio", f"{about.name}-{secrets.token_hex(4)}")
    return Logged(trackio.init(project=PROJECT, name=name, resume="allow", config=dict(about.settings)))


NAMES: Mapping[str, Callable[[Any, About], Reporter]] = {"wandb": _wandb, "mlflow": Mlflow, "trackio": _trackio}


class Reports:
    """All that are told of a run."""

    def __init__(
        self,
        names: Sequence[str],
        folder: Path,
        settings: Mapping[str, Any],
        run_name: str,
        said: Callable[[str], None] = log.warning,
    ) -> None:
        """Raises ConfigError where a package is not there; `said` hears what else goes wrong, from any thread."""
        about = About(run_name, folder, settings)
        found = packages(names)
        self._beside = [_Beside(TENSORBOARD, lambda: Events(folder / TENSORBOARD), said)]
        for name, package in found.items():
            self._beside.append(_Beside(name, _opening(NAMES[name], package, about), said))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Returns at once. What is no finite number is left out."""
        finite = {name: value for name, value in metrics.items() if isfinite(value)}
        for one in self._beside:
            one.log(step, finite)

    def close(self) -> None:
        for one in self._beside:
            one.end()
        until = time.monotonic() + LEAVE_S
        for one in self._beside:
            one.join(until - time.monotonic())


class _Beside:
    """A reporter and its thread."""

    def __init__(self, name: str, opening: Callable[[], Reporter], said: Callable[[str], None]) -> None:
        self._name, self._opening, self._said = name, opening, said
        self._told: Queue[tuple[int, Mapping[str, float]] | None] = Queue(BEHIND)
        self._off = False
        self._thread = Thread(target=self._go_on, name=f"report to {name}", daemon=True)
        self._thread.start()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if not self._off:
            self._put((step, metrics))

    def end(self) -> None:
        if not self._off:
            self._put(None)

    def join(self, left_s: float) -> None:
        if self._off:
            return
        self._thread.join(max(0.0, left_s))
        if self._thread.is_alive():
            self._give_up(f"has not heard everything within {LEAVE_S:g} s")

    def _put(self, what: tuple[int, Mapping[str, float]] | None) -> None:
        try:
            self._told.put_nowait(what)
        except Full:
            self._give_up(f"is {BEHIND} steps behind")

    def _go_on(self) -> None:
        try:
            reporter = self._opening()
            while (told := self._told.get()) is not None:
                reporter.log(*told)
            reporter.close()
        except Exception as error:  # boundary: what others' packages raise must not reach the training
            self._give_up(f"failed ({type(error).__name__}: {error})")

    def _give_up(self, why: str) -> None:
        self._off = True
        self._said(f"{self._name} {why} and is told no more of this run; metrics.jsonl has everything")


def packages(names: Sequence[str]) -> dict[str, Any]:
    """Of the reporters that are asked for. Raises ConfigError where one is not there."""
    return {name: _imported(name) for name in dict.fromkeys(names)}


def _imported(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(
            f"{name} is asked for and cannot be imported ({error})",
            field="report",
            remedy=f"pip install {name}, or leave it out",
        ) from error


def _opening(make: Callable[[Any, About], Reporter], package: Any, about: About) -> Callable[[], Reporter]:
    return lambda: make(package, about)
