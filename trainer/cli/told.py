"""An operator's mistake ends in its message and a code; anything else is ours, and keeps its traceback."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import typer

from gateway.errors import GatewayError, innermost


@contextmanager
def told() -> Iterator[None]:
    """An operator's mistake ends in its message; anything else is ours, and keeps its traceback."""
    try:
        yield
    except KeyboardInterrupt:
        sys.stderr.write("\nmtrl-train: stopped; what was over is saved\n")
        raise typer.Exit(130) from None
    except Exception as error:
        found = innermost(error)
        if not isinstance(found, _mistakes()):
            raise
        sys.stderr.write(f"mtrl-train: {found}\n")
        raise typer.Exit(2) from None


def _mistakes() -> tuple[type[BaseException], ...]:
    from trainer.engine.base import EngineError
    from trainer.run.file import RunError
    from trainer.template.errors import TemplateError

    known = sys.modules.get("trainer.model")
    return (GatewayError, EngineError, RunError, TemplateError, IndexError, *([known.ModelError] if known else []))
