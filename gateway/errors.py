"""What an operator must see. What the policy must see is a `ToolResult`, never an exception.

GatewayError
├── ConfigError       a file is wrong: names file, line, field, problem, remedy
├── SessionError      a session cannot be opened, found, or used as asked
│   └── TooManySessions   no room for one more; there will be when others close
├── ReplayError       the tape does not hold what was asked of it
├── Unavailable       a native tool says that what it depends on is down
└── Refused           the party asked (a front client) will not or cannot answer
"""

from __future__ import annotations

import os
import sysconfig
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import ClassVar

LIBRARIES = tuple(sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib"))
HERE = tuple(f"{Path(__file__).parents[1] / house}{os.sep}" for house in ("gateway", "trainer"))


class GatewayError(Exception):
    """Base of every error that mtrl raises on purpose."""


class ConfigError(GatewayError):
    """One mistake in one file. Its text is complete: what, where, and how to mend it."""

    line_of: ClassVar[staticmethod[[object, str], tuple[str, str, int] | None]] = staticmethod(lambda file, field: None)
    """File, field and line of what a mistake names; whoever reads files says how they are found."""

    def __init__(self, problem: str, *, file: object = None, field: str = "", remedy: str = "") -> None:
        self.problem, self.file, self.field, self.remedy = problem, file, field, remedy
        if file and field and (found := ConfigError.line_of(file, field)) is not None:
            name, field, line = found
            file = f"{name}:{line}"
        self.where = ": ".join(str(place) for place in (file, field) if place)
        """`tools.yaml:3: tools[0].timeout`, as an editor follows it."""
        lines = [f"{self.where}: {problem}" if self.where else problem]
        if remedy:
            lines.append(f"  remedy: {remedy}")
        super().__init__("\n".join(lines))


class ConfigErrors(ConfigError):
    """Several mistakes found in one reading, reported together so that one edit mends them all."""

    def __init__(self, errors: Iterable[ConfigError]) -> None:
        self.errors = tuple(errors)
        super().__init__("\n".join(str(error) for error in self.errors))


class SessionError(GatewayError):
    """A session that cannot be opened, is gone, or was asked for something it does not hold."""


class TooManySessions(SessionError):
    """As many sessions are open as may be: come again when some have closed."""


class ReplayError(GatewayError):
    """The tape has no answer: refusing is better than inventing one."""


class Refused(GatewayError):
    """The party behind a call declines a question that a tool asked it."""


class Unavailable(GatewayError):
    """For native tools to raise when what they depend on is down: the policy is not to blame."""


def innermost(error: BaseException) -> BaseException:
    """The error that a task group wrapped, the first where there are several."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def told(error: BaseException) -> str:
    """What was raised, and where in its user's own file: neither ours nor a library's lines can be mended there."""
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith((*HERE, "<", *LIBRARIES)):
            return f"{text} ({frame.filename}:{frame.lineno})"
    return text
