"""The command `translate`, and settings translated from configurations of verl, ms-swift and TRL."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path
from shlex import quote, split
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gateway.errors import ConfigError
from gateway.plugins import find_missing, load_name
from trainer.cli.errors import report_errors
from trainer.cli.options import MODEL_PANEL, TrainOption, add_train_option, app

if TYPE_CHECKING:
    from mtrl_plugins.scripts.key_table import KeyTable
    from mtrl_plugins.scripts.translate import Translation

VERL_KEY = re.compile(r"(\+{0,2}[A-Za-z_][\w.@/-]*=.*|~[A-Za-z_][\w.@/-]*)", re.DOTALL)
PASS_UNKNOWN_OPTIONS = {"ignore_unknown_options": True, "allow_interspersed_args": True}
"""The words may be a command with options of another program."""


@app.command(context_settings=PASS_UNKNOWN_OPTIONS)
def translate(
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="FILE|COMMAND [KEY=VALUE|--FLAG VALUE]...", help="YAML, scripts, or a command."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="The run file. Default: standard output")
    ] = None,
    table: Annotated[
        bool, typer.Option("--table", help="Print all known keys of verl (or with `swift` ms-swift) as Markdown")
    ] = False,
) -> None:
    """Translate a configuration of verl, ms-swift or TRL to a run file, and report how each key was translated."""
    with report_errors():
        from mtrl_plugins.scripts.translate import format_report, format_run_file, format_table

        if table:
            sys.stdout.write(format_table(load_table("swift" if words == ["swift"] else "verl")) + "\n")
            return
        if not words:
            raise ConfigError("there is no input", field="translate", remedy="name a YAML file, a script, or a command")
        translation = translate_command(words)
        sys.stderr.write(format_report(translation) + "\n")
        if out is None:
            sys.stdout.write(format_run_file(translation))
        else:
            _write_run_file(out, format_run_file(translation))


def _write_run_file(out: Path, text: str) -> None:
    if out.exists():
        raise ConfigError("already exists", file=out, field="--out", remedy="name another file")
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(text, encoding="utf-8")
    sys.stderr.write(f"\nwritten to {out}; check it with: mtrl-train --config {out} --dry-run\n")


def refuse_run_file(file: Path) -> None:
    """Raises ConfigError for a run file of mtrl's own, of which each key would be unknown to the other framework."""
    from gateway.config.reader import read_file
    from trainer.train.settings import TrainSettings

    if file.suffix not in (".yaml", ".yml") or not file.is_file():
        return
    content = read_file(file)
    keys = set(content) if isinstance(content, dict) else set()
    own = TrainSettings.model_fields.keys()
    if keys & {"model", "prompts", "n", "steps", "tools", "mcp", "limits", "update"} and keys <= own:
        remedy = f"run it: mtrl-train --config {quote(str(file))}"
        raise ConfigError("is a run file of mtrl already; there is nothing to translate", file=file, remedy=remedy)


def load_table(framework: str) -> KeyTable:
    """The keys of a framework; raises ConfigError if its plug-in is not installed."""
    if plugin := find_missing(framework):
        remedy = "install mtrl with all its plug-ins"
        raise ConfigError(f"{framework} needs the plug-in {plugin!r}, which is not installed", remedy=remedy)
    table: KeyTable = load_name(f"mtrl_plugins.{framework}.conversions:{framework.upper()}_TABLE")
    return table


def is_trl(file: Path) -> bool:
    """Whether a file is a script in Python, or a YAML file for `trl grpo --config`."""
    if file.suffix not in (".yaml", ".yml") or not file.is_file():
        return file.suffix == ".py"
    from gateway.config.reader import read_file

    content = read_file(file)
    return isinstance(content, dict) and bool(content.keys() & {"model_name_or_path", "num_generations"})


def translate_command(words: list[str]) -> Translation:
    """Translates a configuration of verl, ms-swift or TRL, whichever the words are for."""
    from mtrl_plugins.scripts.script_reader import is_swift
    from mtrl_plugins.scripts.translate import translate as translate_keys

    if words:
        refuse_run_file(Path(words[0]))
    if len(words) == 1 and is_trl(Path(words[0])):
        translation: Translation = load_name("mtrl_plugins.trl.read_trl_file:translate_trl_file")(Path(words[0]))
        return translation
    framework, reader = ("swift", "read_script") if is_swift(words) else ("verl", "read_config")
    table = load_table(framework)
    return translate_keys(load_name(f"mtrl_plugins.{framework}.{reader}:read_command")(words), table)


def translate_to_settings(words: list[str]) -> dict[str, Any]:
    """The settings that a configuration of verl or ms-swift translates to; prints the report."""
    from mtrl_plugins.scripts.translate import format_report

    translation = translate_command(words)
    sys.stderr.write(format_report(translation) + "\n\n")
    return dict(translation.settings)


def read_verl(file: str, keys: Sequence[str]) -> tuple[dict[str, Any], str]:
    """The settings and the name of a run from `--verl-config FILE [KEY=VALUE]...`."""
    return translate_to_settings([file, *keys]), Path(file).stem


def read_swift(text: str, _: Sequence[str]) -> tuple[dict[str, Any], str]:
    """The settings and the name of a run from `--swift FILE`, or from a command in quotes."""
    is_file = Path(text).is_file()
    return translate_to_settings([text] if is_file else split(text)), Path(text).stem if is_file else "swift"


add_train_option(
    TrainOption(
        name="--verl-config",
        help="YAML or a script for verl",
        metavar="FILE [KEY=VALUE]...",
        panel=MODEL_PANEL,
        words=VERL_KEY,
        read=read_verl,
    )
)
add_train_option(
    TrainOption(
        name="--swift",
        help="A script for ms-swift, or its command in quotes",
        metavar="FILE|COMMAND",
        panel=MODEL_PANEL,
        read=read_swift,
    )
)
