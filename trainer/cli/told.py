"""An operator's mistake ends in its message and a code; anything else is ours, and keeps its traceback."""

from __future__ import annotations

import errno
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

import typer

from gateway.errors import ConfigError, ConfigErrors, GatewayError, innermost

MISTAKES = (
    ("trainer.engine.base", "EngineError"),
    ("trainer.run.file", "RunError"),
    ("trainer.template.errors", "TemplateError"),
    ("trainer.model", "ModelError"),
    ("trainer.learn.finite", "NotFinite"),
    ("trainer.learn.rounds", "RoundsError"),
    ("trainer.policy.errors", "PolicyError"),
    ("trainer.train.checkpoint", "CheckpointError"),
    ("trainer.train.loop", "NothingScored"),
)
"""What tells an operator how to mend it. What nobody has imported, nobody has raised."""

DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES)
READ: ContextVar[Path | None] = ContextVar("the run file of this command", default=None)
"""Where what is wrong with a setting was written, if anywhere."""
ROOM = "make room there, or name a folder of yours with --out"


def saved() -> str:
    return "what was over is saved"


@contextmanager
def told(*also: type[Exception], stopped: Callable[[], str] = saved) -> Iterator[None]:
    """`also` are mistakes where they come from what was typed; `stopped` is said to whoever leaves by Ctrl-C."""
    try:
        yield
    except KeyboardInterrupt:
        sys.stderr.write(f"\nmtrl-train: stopped; {stopped()}\n")
        raise typer.Exit(130) from None
    except Exception as error:
        found = innermost(error)
        if isinstance(found, OSError) and found.errno in DISK:
            found = ConfigError(f"cannot be written ({found.strerror})", file=found.filename or "the disk", remedy=ROOM)
        if not isinstance(found, (*_mistakes(), *also)):
            raise
        sys.stderr.write(f"mtrl-train: {_placed(found)}\n")
        raise typer.Exit(2) from None


def _placed(mistake: BaseException) -> BaseException:
    """With its line in the run file, if it names a setting that stands there and no file of its own."""
    if isinstance(mistake, ConfigErrors):
        return ConfigErrors(one for one in map(_placed, mistake.errors) if isinstance(one, ConfigError))
    file = READ.get()
    if not isinstance(mistake, ConfigError) or mistake.file or file is None:
        return mistake
    placed = ConfigError(mistake.problem, file=file, field=mistake.field, remedy=mistake.remedy)
    return placed if ConfigError.line_of(file, mistake.field) else mistake


def _mistakes() -> tuple[type[BaseException], ...]:
    known = ((sys.modules.get(module), name) for module, name in MISTAKES)
    return (GatewayError, *(getattr(module, name) for module, name in known if module is not None))
