"""A run is a folder that one process writes: how it was made, what came of each step, and where to go on.

runs/NAME/run.json         the resolved settings and the versions that made it
runs/NAME/metrics.jsonl    a line for each step
runs/NAME/rollouts.jsonl   every rollout, as `run/file.py` describes
runs/NAME/tapes/000000     what the tools answered, from this step on, where it was recorded
runs/NAME/checkpoints/     see `checkpoint.py`
runs/NAME/tensorboard/     for TensorBoard
"""

from __future__ import annotations

import fcntl
import json
import os
import platform
import shutil
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import TracebackType
from typing import Self

from gateway.errors import ConfigError
from trainer.config import flat
from trainer.run import credits
from trainer.run.about import ABOUT
from trainer.run.file import NAME as ROLLOUTS
from trainer.train.checkpoint import Checkpoints
from trainer.train.settings import TrainSettings

METRICS = "metrics.jsonl"
TAPES = "tapes"
RUNS = Path("runs")
LOCK = ".lock"
MAY_CHANGE = frozenset({"out", "steps", "evaluation", "checkpoint", "report", "engine", "serving"})
"""Settings that say nothing of what a step is."""
VERSIONS = ("mtrl", "torch", "transformers", "mcp")


def free(name: str) -> Path:
    """The next folder in `runs/` that nobody has."""
    number = 1
    while (folder := RUNS / (name if number == 1 else f"{name}-{number}")).exists():
        number += 1
    return folder


def newest() -> Path:
    """The run that was worked on last."""
    runs = [about.parent for about in RUNS.glob(f"*/{ABOUT}")]
    if not runs:
        raise ConfigError("there is no run to go on with", file=RUNS, remedy="name its folder with --out")
    return max(runs, key=lambda run: _changed(run))


def _changed(run: Path) -> float:
    metrics = run / METRICS
    return (metrics if metrics.exists() else run / ABOUT).stat().st_mtime


def folder_of(settings: TrainSettings, name: str, *, resume: bool) -> Path:
    """The run's folder: the one that is named, the newest to go on with, or the next free one."""
    if settings.out is not None:
        return settings.out
    return newest() if resume else free(name)


class Folder:
    """Entered by the one process that writes; it may be read by any."""

    def __init__(self, path: Path, keep: int = 2) -> None:
        self.path = path
        self.checkpoints = Checkpoints(path, keep)
        self._lock = -1

    def __enter__(self) -> Self:
        self.path.mkdir(parents=True, exist_ok=True)
        self._lock = os.open(self.path / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(self._lock)
            raise ConfigError("another process trains here", file=self.path, remedy="wait, or name another") from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self.begun:
            self._leave_nothing()
        os.close(self._lock)

    def _leave_nothing(self) -> None:
        """Of what was made for a run that never began; what was in the folder before stays."""
        shutil.rmtree(self.path / TAPES, ignore_errors=True)
        (self.path / LOCK).unlink(missing_ok=True)
        with suppress(OSError):
            self.path.rmdir()

    @property
    def begun(self) -> bool:
        return (self.path / ABOUT).exists()

    def describe(self, settings: TrainSettings, model: Path, engine: str) -> None:
        """Written before the first step, whole or not at all."""
        about = {
            "versions": {name: _version(name) for name in VERSIONS} | {"python": platform.python_version()},
            "machine": {"system": platform.system(), "processor": platform.machine(), "cores": os.cpu_count()},
            "engine": engine,
            "model": str(model),
            "settings": settings.model_dump(mode="json"),
        }
        beside = self.path / f"{ABOUT}.writing"
        beside.write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
        beside.rename(self.path / ABOUT)

    def settings(self) -> TrainSettings:
        """What the run was made with."""
        return settings_of(self.path)

    @property
    def model(self) -> Path | None:
        """What the run began with, if it is still there: a demo's would be made anew, and perhaps otherwise by now."""
        folder = Path(json.loads((self.path / ABOUT).read_text(encoding="utf-8")).get("model", ""))
        return folder if folder.is_absolute() and folder.is_dir() else None

    def cut(self, rollouts: int, step: int) -> None:
        """Forgets the rollouts of steps that are made again, those after this one, and what they were worth."""
        credits.cut(self.path / credits.NAME, step)
        file = self.path / ROLLOUTS
        if file.exists() and file.stat().st_size > rollouts:
            os.truncate(file, rollouts)

    @property
    def written(self) -> int:
        """Bytes of rollouts so far."""
        file = self.path / ROLLOUTS
        return file.stat().st_size if file.exists() else 0

    def tape(self, step: int) -> Path:
        """A new one of the steps from this one on; what was recorded of them before is gone."""
        for tape in (self.path / TAPES).glob("[0-9]*"):
            if int(tape.name) >= step:
                shutil.rmtree(tape, ignore_errors=True)
        return self.path / TAPES / f"{step:06}"

    def tape_of(self, step: int) -> Path | None:
        """The one that a step is on."""
        tapes = sorted(tape for tape in (self.path / TAPES).glob("[0-9]*") if int(tape.name) <= step)
        return tapes[-1] if tapes else None


def settings_of(run: Path) -> TrainSettings:
    try:
        about = json.loads((run / ABOUT).read_text(encoding="utf-8"))
        return TrainSettings.model_validate(about["settings"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        remedy = "name a folder that `mtrl-train --out` made"
        raise ConfigError(f"is no training run ({type(error).__name__})", file=run, remedy=remedy) from error


def differences(before: TrainSettings, after: TrainSettings) -> list[str]:
    """What cannot change in the midst of a run, and did."""
    old, new = flat(before.model_dump(mode="json")), flat(after.model_dump(mode="json"))
    return [
        f"{name} was {old.get(name)!r}, and is {new.get(name)!r}"
        for name in sorted(old.keys() | new.keys())
        if old.get(name) != new.get(name) and name.split(".")[0] not in MAY_CHANGE
    ]


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"
