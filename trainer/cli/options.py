"""What several commands have in common."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    help="Train language models to use tools: rollouts over many turns, exact to the token.",
    epilog="Try: mtrl-train --tools tool_configs/",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Tools = Annotated[str, typer.Option(metavar="DIR|URL", help="Folder of YAML, or a running `mtrl-gateway serve`.")]
Mcp = Annotated[Path | None, typer.Option(metavar="FILE", help="Servers file. Default: the one beside --tools")]
Run = Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder, as runs/NAME.")]
