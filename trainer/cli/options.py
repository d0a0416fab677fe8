"""The Typer app and options shared by several commands. Imports nothing heavy, so that `--help` is fast."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from trainer.cli.errors import NAMED_PATHS

JOBS_FOLDER = Path(__file__).parents[1] / "jobs"
"""Run files that come with the package."""
JOB_NAMES = ", ".join(sorted(file.stem for file in JOBS_FOLDER.glob("*.yaml")))
VERL_OPTION, SWIFT_OPTION = "--verl-config", "--swift"
VERL_KEY = re.compile(r"(\+{0,2}[A-Za-z_][\w.@/-]*=.*|~[A-Za-z_][\w.@/-]*)", re.DOTALL)


class VerlKeyGroup(TyperGroup):
    """Takes `data.seed=1` as an override of verl's configuration, not as a command, if there is `--verl-config`.

    Remembers the words of the command line, for errors about paths.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        NAMED_PATHS.set({name: word for name, word in zip(["", *args], args, strict=False) if name.startswith("--")})
        if any("\0" in word for word in args):
            raise typer.BadParameter("has a null character", param_hint=repr(next(w for w in args if "\0" in w))[:80])
        if not any(word.partition("=")[0] == VERL_OPTION for word in args):
            return super().parse_args(ctx, args)
        with_value = {name for param in self.params if not getattr(param, "is_flag", False) for name in param.opts}
        words: list[str] = []
        ctx.obj = []
        for word in args:
            is_value = bool(words) and words[-1] in with_value
            (ctx.obj if VERL_KEY.fullmatch(word) and not is_value else words).append(word)
        return super().parse_args(ctx, words)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Says which option a word belongs to that is no command: a run's folder, or a run file."""
        word = args[0]
        if self.get_command(ctx, word) is None:
            if ctx.params.get("resume"):
                ctx.fail(f"No such command {word!r}. A run is resumed with: --resume --out {word}")
            if word in JOB_NAMES.split(", ") or word.endswith((".yaml", ".yml")):
                ctx.fail(f"No such command {word!r}. A run file is named with: --config {word}")
        return super().resolve_command(ctx, args)


app = typer.Typer(
    cls=VerlKeyGroup,
    epilog=f"A run file can set everything; the jobs that come with mtrl are examples: {JOB_NAMES}.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

RUN_PANEL = "Commands for an existing run"
"""The commands' heading in the help."""
ToolsOption = Annotated[
    str, typer.Option(metavar="DIR|URL", help="Folder of tool configs, or URL of `mtrl-gateway serve`.")
]
McpOption = Annotated[
    Path | None, typer.Option(metavar="FILE", help="MCP servers. Default: mcp_servers.json beside --tools")
]
ENVIRONMENT_FORMS = "gymnasium:NAME|textarena:NAME|openenv:URL|verifiers:PACKAGE"
EnvironmentOption = Annotated[
    str | None,
    typer.Option(metavar=ENVIRONMENT_FORMS, help="An environment of another framework; see `mtrl-train env`."),
]
RunFolder = Annotated[Path, typer.Argument(metavar="RUN", help="The run's folder, such as runs/NAME.")]
