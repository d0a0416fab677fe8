"""Prints operators' errors as a message with an exit code; other exceptions keep their traceback."""

from __future__ import annotations

import errno
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

import typer

from gateway.disk_errors import FULL_ERRNOS, READ_ONLY_ERRNOS, write_error_remedy
from gateway.errors import ConfigError, ConfigErrors, GatewayError, unwrap_error

OPERATOR_ERRORS = (
    ("trainer.engine.base", "EngineError"),
    ("trainer.storage.rollout_file", "RunError"),
    ("trainer.template.errors", "TemplateError"),
    ("trainer.model", "ModelError"),
    ("trainer.algorithms.packing", "NotFiniteError"),
    ("trainer.algorithms.token_weights", "TokenWeightError"),
    ("trainer.policy.errors", "PolicyError"),
    ("trainer.train.checkpoint", "CheckpointError"),
    ("trainer.train.train_loop", "NothingScoredError"),
)
"""Errors whose messages say how to fix them; looked up only in modules that are already imported."""

DISK_ERRNOS = (*FULL_ERRNOS, errno.EFBIG, *READ_ONLY_ERRNOS)
RUN_FILE: ContextVar[Path | None] = ContextVar("the run file of this command", default=None)
"""The run file of this command, where errors in settings are located."""


def describe_stop() -> str:
    """The default message after Ctrl-C."""
    return "rollouts that ended before are saved"


@contextmanager
def report_errors(*extra: type[Exception], stopped: Callable[[], str] = describe_stop) -> Iterator[None]:
    """Reports operators' errors and those of the types `extra`; `stopped` is the message after Ctrl-C."""
    try:
        yield
    except KeyboardInterrupt:
        sys.stderr.write(f"\nmtrl-train: stopped; {stopped()}\n")
        raise typer.Exit(130) from None
    except Exception as error:
        cause = unwrap_error(error)
        if isinstance(cause, OSError) and cause.errno in DISK_ERRNOS:
            file = cause.filename or "the disk"
            folder = Path(file) if cause.filename else Path.cwd()
            remedy = write_error_remedy(folder, cause, "or name another folder with --out")
            cause = ConfigError(f"cannot be written ({cause.strerror})", file=file, remedy=remedy)
        if not isinstance(cause, (*_operator_error_types(), *extra)):
            raise
        sys.stderr.write(f"mtrl-train: {_add_location(cause)}\n")
        raise typer.Exit(getattr(cause, "exit_code", 2)) from None


def _add_location(error: BaseException) -> BaseException:
    """The error with the line of its setting in the run file, if it has no file yet."""
    if isinstance(error, ConfigErrors):
        return ConfigErrors(located for located in map(_add_location, error.errors) if isinstance(located, ConfigError))
    file = RUN_FILE.get()
    if not isinstance(error, ConfigError) or error.file or file is None:
        return error
    located = ConfigError(error.problem, file=file, field=error.field, remedy=error.remedy)
    return located if ConfigError.locate(file, error.field) else error


def _operator_error_types() -> tuple[type[BaseException], ...]:
    modules = ((sys.modules.get(module), name) for module, name in OPERATOR_ERRORS)
    return (GatewayError, *(getattr(module, name) for module, name in modules if module is not None))
