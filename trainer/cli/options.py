"""What several commands have in common."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

JOBS = ", ".join(sorted(file.stem for file in (Path(__file__).parents[1] / "jobs").glob("*.yaml")))
VERL, SWIFT = "--verl-config", "--swift"
KEY = re.compile(r"(\+{0,2}[A-Za-z_][\w.@/-]*=.*|~[A-Za-z_][\w.@/-]*)", re.DOTALL)


class Keys(TyperGroup):
    """With a file of verl's, words like `data.seed=1` are keys of that file, and no commands."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not any(word.partition("=")[0] == VERL for word in args):
            return super().parse_args(ctx, args)
        valued = {name for one in self.params if not getattr(one, "is_flag", False) for name in one.opts}
        kept: list[str] = []
        ctx.obj = []
        for word in args:
            is_value = bool(kept) and kept[-1] in valued
            (ctx.obj if KEY.fullmatch(word) and not is_value else kept).append(word)
        return super().parse_args(ctx, kept)


app = typer.Typer(
    cls=Keys,
    epilog=f"Every setting has its place in a run file; those that come with mtrl are examples: {JOBS}.",
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
