"""What several commands have in common."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    epilog="Every setting has its place in a run file; those that come with mtrl are examples: default, second, gsm8k.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

ASKED = "Commands for a run that is there"
"""Where they stand in the help."""
Tools = Annotated[str, typer.Option(metavar="DIR|URL", help="Folder of YAML, or a running `mtrl-gateway serve`.")]
Mcp = Annotated[Path | None, typer.Option(metavar="FILE", help="MCP servers. Default: the file beside --tools")]
Run = Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder, as runs/NAME.")]
