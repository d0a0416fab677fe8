"""The training of `--ranks N` as a child process of this command, which starts it again after a rank is lost."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from gateway.errors import ConfigError
from trainer.distributed.restart_ranks import RestartedTraining, is_restarted, run_restarted

if TYPE_CHECKING:
    from trainer.train.settings import TrainSettings

COMMAND_WORDS: ContextVar[Sequence[str] | None] = ContextVar("the arguments of this process", default=None)
"""The arguments of this process, if it is the command `mtrl-train`; other programs are not started again."""


def has_run_to_resume(out: str | None) -> bool:
    """Whether the folder of `--auto-resume` has a run."""
    if out is None:
        remedy = "name the run's folder with --out, or use --resume"
        raise ConfigError("needs a folder to look in", field="--auto-resume", remedy=remedy)
    return (Path(out) / "run.json").exists()


def restarts_ranks(settings: TrainSettings) -> bool:
    """Whether this command runs the training as a child."""
    return COMMAND_WORDS.get() is not None and is_restarted(settings.distributed)


def train_with_restarts(settings: TrainSettings, name: str, flags: Sequence[str], *, resume: bool) -> None:
    """Runs this command's training, again after ranks are lost; exits with its exit code."""
    from trainer.train.run_folder import choose_run_folder

    folder = choose_run_folder(settings, name, resume=resume)
    training = RestartedTraining(folder, COMMAND_WORDS.get() or (), flags)
    raise typer.Exit(run_restarted(training, settings.distributed, _log))


def _log(text: str) -> None:
    sys.stderr.write(f"mtrl-train: {text}\n")
    sys.stderr.flush()
