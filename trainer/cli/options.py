"""The Typer app and options shared by several commands. Imports nothing heavy, so that `--help` is fast."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gateway.plugin_commands import PluginGroup
from gateway.plugins import installed_plugins
from trainer.cli.errors import NAMED_PATHS

if TYPE_CHECKING:
    from trainer.train.settings import TrainSettings

PANELS = MODEL_PANEL, TRAIN_PANEL = "Model, data and tools", "Run"
"""Headings of the main command's options."""


@dataclass(frozen=True, kw_only=True)
class TrainOption:
    """An option of the main command that a plug-in adds; it does one of what the callables say."""

    name: str
    help: str
    metavar: str | None = None
    panel: str = TRAIN_PANEL
    is_flag: bool = False
    kind: Any = str
    words: re.Pattern[str] | None = None
    """Further words of the command line that belong to its value."""
    read: Callable[[str, Sequence[str]], tuple[dict[str, Any], str]] | None = None
    """Reads settings instead of a run file, of its value and its words; returns them and the run's name."""
    launch: Callable[[TrainSettings, str, TrainOptions], None] | None = None
    """Runs the job elsewhere, with the settings, the run's name, and all options."""
    accompany: Callable[[Path], AbstractContextManager[None]] | None = None
    """Entered with the run's folder while the run trains."""

    @property
    def parameter(self) -> inspect.Parameter:
        """The parameter of the command's function."""
        declared = typer.Option(self.name, help=self.help, metavar=self.metavar, rich_help_panel=self.panel)
        kind, default = (bool, False) if self.is_flag else (self.kind | None, None)
        name = self.name.lstrip("-").replace("-", "_")
        return inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, declared]
        )


TRAIN_OPTIONS: dict[str, TrainOption] = {}
"""The options that plug-ins have added, by name."""


@dataclass(frozen=True)
class TrainOptions:
    """What was given to the main command."""

    settings: Mapping[str, Any]
    """Settings of the run file by name, as options override them; `config` is the run file."""
    ranks: int | None
    resume: bool
    others: Mapping[str, Any]
    """Options of plug-ins, by name."""


_main_commands: list[Callable[..., None]] = []


def add_train_option(option: TrainOption) -> None:
    """Adds an option to the main command, which may be there already: modules are imported in any order."""
    TRAIN_OPTIONS[option.name] = option
    for command in _main_commands:
        add_plugin_options(command)


def add_plugin_options(command: Callable[..., None]) -> Callable[..., None]:
    """The command, whose signature gets the options of plug-ins in place of its `**others`."""
    _main_commands[:] = [command]
    parameters = {
        parameter.name: parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for parameter in inspect.signature(command, eval_str=True).parameters.values()
        if parameter.kind is not inspect.Parameter.VAR_KEYWORD
    }
    parameters |= {option.parameter.name: option.parameter for _, option in sorted(TRAIN_OPTIONS.items())}
    command.__signature__ = inspect.Signature([*parameters.values()])  # type: ignore[attr-defined]
    command.__annotations__ = {name: parameter.annotation for name, parameter in parameters.items()}
    return command


def find_jobs() -> dict[str, Path]:
    """Run files that can be named without their path."""
    folders = [plugin.jobs for plugin in installed_plugins() if plugin.jobs is not None]
    return {file.stem: file for folder in folders for file in sorted(folder.glob("*.yaml"))}


class TrainGroup(PluginGroup):
    """Takes the options that plug-ins add, with the words that belong to their values.

    Remembers the words of the command line, for errors about paths.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        NAMED_PATHS.set({name: word for name, word in zip(["", *args], args, strict=False) if name.startswith("--")})
        if any("\0" in word for word in args):
            raise typer.BadParameter("has a null character", param_hint=repr(next(w for w in args if "\0" in w))[:80])
        names = {word.partition("=")[0] for word in args}
        patterns = [option.words for name, option in TRAIN_OPTIONS.items() if option.words and name in names]
        patterns = patterns or [OVERRIDE]
        with_value = {name for param in self.params if not getattr(param, "is_flag", False) for name in param.opts}
        words: list[str] = []
        ctx.obj = []
        for index, word in enumerate(args):
            is_value = bool(words) and words[-1] in with_value
            if patterns == [OVERRIDE] and not is_value and not word.startswith("-") and not OVERRIDE.fullmatch(word):
                words += args[index:]  # A command, with words of its own.
                break
            is_taken = any(pattern.fullmatch(word) for pattern in patterns) and not is_value
            (ctx.obj if is_taken else words).append(word)
        return super().parse_args(ctx, words or ["--"] * bool(ctx.obj))  # no words at all are a wish for help

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Says which option a word belongs to that is no command: a run's folder, or a run file."""
        word = args[0]
        if self.get_command(ctx, word) is None:
            if ctx.params.get("resume"):
                ctx.fail(f"No such command {word!r}. A run is resumed with: --resume --out {word}")
            if word in find_jobs() or word.endswith((".yaml", ".yml")):
                ctx.fail(f"No such command {word!r}. A run file is named with: --config {word}")
        return super().resolve_command(ctx, args)


app = typer.Typer(
    cls=TrainGroup,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

OVERRIDE = re.compile(r"[A-Za-z_]\w*(\.\w+)*=.*", re.DOTALL)
"""A word that sets one setting, such as `update.lr=1e-4`."""
RUN_PANEL = "Commands for an existing run"
"""The commands' heading in the help."""
McpOption = Annotated[
    Path | None, typer.Option(metavar="FILE", help="MCP servers. Default: mcp_servers.json beside --tools")
]
ENVIRONMENT_FORMS = "gymnasium:NAME|textarena:NAME|openenv:URL|verifiers:PACKAGE"
EnvironmentOption = Annotated[
    str | None, typer.Option(metavar=ENVIRONMENT_FORMS, help="An environment of another framework.")
]
OverrideWords = Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Settings to change.")]
RunFolder = Annotated[Path, typer.Argument(metavar="RUN", help="The run's folder, such as runs/NAME.")]
