"""The exceptions that mtrl raises, for operators. A policy never sees an exception: failed calls are `ToolResult`s.

OperatorError                 the text says how to fix it; those of the trainer are beside what raises them
└── GatewayError
    ├── ConfigError           an error in a file, with file, line, field, problem and remedy
    ├── SessionError          a session cannot be opened, found or used in this way
    │   └── TooManySessions   the limit on open sessions is reached
    ├── ReplayError           the tape has no recording of this
    ├── Unavailable           a native tool's dependency is down
    └── RequestDeclined       the client declines or cannot answer a tool's request (elicitation, sampling)
"""

from __future__ import annotations

import os
import sysconfig
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import ClassVar

LIBRARY_FOLDERS = tuple(sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib"))
OWN_FOLDERS = tuple(f"{Path(__file__).parents[1] / house}{os.sep}" for house in ("gateway", "mtrl_plugins", "trainer"))


class OperatorError(Exception):
    """Base of all errors whose text says how to fix them: commands print it without a traceback."""


class GatewayError(OperatorError):
    """Base of the errors of a gateway, its files and its sessions."""


class ConfigError(GatewayError):
    """One error in one file; its text says what is wrong, where, and how to fix it."""

    locate: ClassVar[staticmethod[[object, str], tuple[str, str, int] | None]] = staticmethod(lambda file, field: None)
    """Finds the file, field and line of an error; set by the module that reads files."""

    def __init__(self, problem: str, *, file: object = None, field: str = "", remedy: str = "") -> None:
        self.problem, self.file, self.field, self.remedy = problem, file, field, remedy
        if file and field and (location := ConfigError.locate(file, field)) is not None:
            name, field, line = location
            file = f"{name}:{line}"
        self.where = ": ".join(str(part) for part in (file, field) if part)
        """`tools.yaml:3: tools[0].timeout`, which editors recognise as a link."""
        lines = [f"{self.where}: {problem}" if self.where else problem]
        if remedy:
            lines.append(f"  remedy: {remedy}")
        super().__init__("\n".join(lines))


class ConfigErrors(ConfigError):
    """Several errors, reported together so that all can be fixed at once."""

    def __init__(self, errors: Iterable[ConfigError]) -> None:
        self.errors = tuple(errors)
        super().__init__("\n".join(str(error) for error in self.errors))


class SessionError(GatewayError):
    """A session cannot be opened, is closed, or does not offer what is requested."""


class TooManySessions(SessionError):
    """The limit on open sessions is reached; retry when some have closed."""


class ReplayError(GatewayError):
    """The tape has no recording of this call or session."""


class RequestDeclined(GatewayError):
    """The client behind a call declines a tool's request (elicitation, sampling or roots)."""


class Unavailable(GatewayError):
    """Raised by native tools when something they depend on is down; the call ends `unavailable`."""

    exit_code = 1
    """Of a program that it ends: another try may do."""


class UserCodeError(Exception):
    """User code ended with an exception that is no `Exception`, such as KeyboardInterrupt or a panic of a library."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(format_error(error))
        self.error = error


def unwrap_error(error: BaseException) -> BaseException:
    """The first error inside an exception group, or what user code raised."""
    while isinstance(error, BaseExceptionGroup | UserCodeError):
        error = error.error if isinstance(error, UserCodeError) else error.exceptions[0]
    return error


def error_text(error: BaseException) -> str:
    """The text of an exception. User code may have written its `__str__`, which may raise anything."""
    try:
        return str(error)
    except BaseException as failure:  # boundary: user code
        return f"[its __str__ raised {type(failure).__name__}]"


def safe_repr(value: object, max_chars: int = 80) -> str:
    """The start of a value's `repr`. User code may have written it, and it may raise anything."""
    try:
        return repr(value)[:max_chars]
    except BaseException:  # boundary: user code
        return f"a {type(value).__name__}"


def format_error(error: BaseException) -> str:
    """`ValueError: text`, or only the name if there is no text."""
    if isinstance(error, UserCodeError):
        error = error.error
    text = error_text(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def describe_exception(error: BaseException) -> str:
    """The exception's text with the last line of the user's own code in its traceback."""
    if isinstance(error, UserCodeError):
        error = error.error
    text = format_error(error)
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith((*OWN_FOLDERS, "<", *LIBRARY_FOLDERS)):
            return f"{text} ({frame.filename}:{frame.lineno})"
    return text
