"""The command as one of many ranks: started again after a rank is lost, or following rank 0."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import typer

from gateway.errors import ConfigError, GatewayError
from trainer.cli.errors import print_line
from trainer.distributed.rank_environment import NOT_AGAIN, detect_environment, take_file, write_exit_code
from trainer.distributed.restart_ranks import RestartedTraining, is_restarted, run_restarted

if TYPE_CHECKING:
    from trainer.train.settings import TrainSettings


def is_other_rank() -> bool:
    """Whether a launcher started this process as another rank than 0."""
    environment = detect_environment()
    return environment is not None and environment.rank > 0


@contextmanager
def keep_exit_code() -> Iterator[None]:
    """Writes rank 0's exit code to the file that the job's script names."""
    take_file()
    try:
        yield
    except typer.Exit as end:
        write_exit_code(end.exit_code)
        raise


def follow_and_exit(load: Callable[[], tuple[TrainSettings, str]]) -> NoReturn:
    """Runs this rank, and ends the process at once: torch's threads may abort it while the interpreter ends.

    To a launcher that would be another failed rank, and its job would not end while this one is started again.
    """
    code = _follow_rank_0(load)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


def _follow_rank_0(load: Callable[[], tuple[TrainSettings, str]]) -> int:
    """Returns this rank's exit code. Rank 0 reports what is wrong with its settings."""
    from trainer.distributed.follow import follow
    from trainer.distributed.settings import DistributedSettings

    environment = detect_environment()
    if environment is None:
        return NOT_AGAIN
    try:
        settings, _ = load()
    except GatewayError as error:
        return follow(environment, DistributedSettings(), None, str(error))
    return follow(environment, settings.distributed, settings.model_dump(mode="json"))


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
    raise typer.Exit(run_restarted(training, settings.distributed, print_line))
