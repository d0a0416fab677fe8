"""An operator's mistake ends in its message and a code; anything else is ours, and keeps its traceback."""

from __future__ import annotations

import errno
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import typer

from gateway.errors import ConfigError, GatewayError, innermost

MISTAKES = (
    ("trainer.engine.base", "EngineError"),
    ("trainer.run.file", "RunError"),
    ("trainer.template.errors", "TemplateError"),
    ("trainer.model", "ModelError"),
    ("trainer.learn.finite", "NotFinite"),
    ("trainer.policy.errors", "PolicyError"),
    ("trainer.train.checkpoint", "CheckpointError"),
    ("trainer.train.loop", "NothingScored"),
)
"""What tells an operator how to mend it. What nobody has imported, nobody has raised."""

DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES)
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
        sys.stderr.write(f"mtrl-train: {found}\n")
        raise typer.Exit(2) from None


def _mistakes() -> tuple[type[BaseException], ...]:
    known = ((sys.modules.get(module), name) for module, name in MISTAKES)
    return (GatewayError, *(getattr(module, name) for module, name in known if module is not None))
