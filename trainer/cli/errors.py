"""Prints operators' errors as a message with an exit code; other exceptions keep their traceback."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from shlex import quote

import typer

from gateway.disk_errors import FULL_ERRNOS, READ_ONLY_ERRNOS, write_error_remedy
from gateway.errors import ConfigError, ConfigErrors, OperatorError, unwrap_error
from gateway.types import EMPTY

PATH_ERRNOS = (
    errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENAMETOOLONG, errno.EACCES, errno.EPERM, errno.ELOOP,
)  # fmt: skip
"""A path that a user named is not what it should be."""
SYMLINK_LOOP = "Symlink loop from "
"""How `pathlib` begins an error, which has no number."""
MAX_SHOWN = 200
"""Characters of a path that are shown."""
DISK_ERRNOS = (*FULL_ERRNOS, errno.EFBIG, *READ_ONLY_ERRNOS)
RUN_FILE: ContextVar[Path | None] = ContextVar("the run file of this command", default=None)
"""The run file of this command, where errors in settings are located."""
NAMED_PATHS: ContextVar[Mapping[str, str]] = ContextVar("texts of options and settings", default=EMPTY)
"""Every text in the command's options and settings, by its name: one of them may be the path that an error is about."""


def print_line(text: str) -> None:
    """Prints a line to standard error, at once."""
    sys.stderr.write(f"mtrl-train: {text}\n")
    sys.stderr.flush()


@contextmanager
def report_errors(
    *extra: type[Exception], stopped: Callable[[], str] = lambda: "rollouts that ended before are saved"
) -> Iterator[None]:
    """Reports operators' errors and those of the types `extra`; `stopped` is the message after Ctrl-C."""
    try:
        yield
    except KeyboardInterrupt:
        sys.stderr.write(f"\nmtrl-train: stopped; {stopped()}\n")
        raise typer.Exit(130) from None
    except Exception as error:
        cause = _explain_unreadable_file(unwrap_error(error))
        if isinstance(cause, OSError) and cause.errno in DISK_ERRNOS:
            file = cause.filename or "the disk"
            folder = Path(file) if cause.filename else Path.cwd()
            remedy = write_error_remedy(folder, cause, "or name another folder with --out")
            cause = ConfigError(f"cannot be written ({cause.strerror})", file=file, remedy=remedy)
        cause = _explain_path_error(cause)
        if not isinstance(cause, (OperatorError, *extra)):
            raise
        sys.stderr.write(f"mtrl-train: {_add_location(cause)}\n")
        raise typer.Exit(getattr(cause, "exit_code", 2)) from None


def _explain_unreadable_file(error: BaseException) -> BaseException:
    """An error about a file of another account, such as a checkpoint, as one that says so; other errors unchanged."""
    file = error.filename if isinstance(error, PermissionError) else None
    if isinstance(file, str) and os.path.isfile(file) and not os.access(file, os.R_OK):
        remedy = f"let its owner make it readable: chmod a+r {quote(file)}"
        return ConfigError("cannot be read by this user (Permission denied)", file=file, remedy=remedy)
    return error


def _explain_path_error(error: BaseException) -> BaseException:
    """An error about a path that the user named, as an error that says which setting names it."""
    if isinstance(error, OSError) and error.errno in PATH_ERRNOS and error.filename is not None:
        file, problem = str(error.filename), str(error.strerror)
    elif isinstance(error, RuntimeError) and str(error).startswith(SYMLINK_LOOP):
        file, problem = str(error).removeprefix(SYMLINK_LOOP).strip("'"), "Symlink loop"
    else:
        return error
    texts = {name: text for name, text in NAMED_PATHS.get().items() if text}
    named = {name: text for name, text in texts.items() if Path(file).is_relative_to(Path.cwd() / text)}
    named |= {name: text for name, text in texts.items() if Path(file).is_relative_to(text)}
    name = max(named, key=lambda name: len(named[name]), default="")
    if not name:  # Not a mistake in the settings.
        return error
    return ConfigError(f"cannot be used ({problem})", file=file[:MAX_SHOWN], field=name, remedy="name another path")


def _add_location(error: BaseException) -> BaseException:
    """The error with the line of its setting in the run file, if it has no file yet."""
    if isinstance(error, ConfigErrors):
        return ConfigErrors(located for located in map(_add_location, error.errors) if isinstance(located, ConfigError))
    file = RUN_FILE.get()
    if not isinstance(error, ConfigError) or error.file or file is None:
        return error
    located = ConfigError(error.problem, file=file, field=error.field, remedy=error.remedy)
    return located if ConfigError.locate(file, error.field) else error
