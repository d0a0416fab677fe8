"""Shows runs: tables and charts in the terminal, progress panels, figures and data frames."""

from trainer.view.dataframes import RunTables, load

__all__ = ["RunTables", "load"]
