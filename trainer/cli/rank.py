"""The command line of a rank that torchrun or srun started beside rank 0: it prints nothing, and follows rank 0."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NoReturn

import typer

from gateway.errors import GatewayError
from trainer.distributed.exit_code import NOT_AGAIN, take_file, write_exit_code
from trainer.distributed.rank_environment import detect_environment

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
