"""Shows runs: tables and charts in the terminal, progress panels, figures and data frames."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainer.view.dataframes import RunTables as RunTables
    from trainer.view.dataframes import load as load

__all__ = ["RunTables", "load"]


def __getattr__(name: str) -> Any:
    """Imports `load` and `RunTables` on first use, so that `mtrl-train show` starts quickly."""
    if name in __all__:
        from trainer.view import dataframes

        return getattr(dataframes, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
