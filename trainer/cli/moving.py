"""Moving in from the command line: what was configured for another trainer becomes a run file, or runs at once."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gateway.errors import ConfigError
from trainer.cli.options import app
from trainer.cli.told import told

if TYPE_CHECKING:
    from trainer.verl.translate import Translation

WORDS = {"ignore_unknown_options": True, "allow_interspersed_args": True}
"""A whole command of another program has options of its own."""


@app.command(context_settings=WORDS)
def translate(
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="FILE|COMMAND [KEY=VALUE|--FLAG VALUE]...", help="YAML, scripts, or a whole command."),
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", metavar="FILE", help="The run file. Default: shown")] = None,
    table: Annotated[
        bool, typer.Option("--table", help="Show all keys that are known, as Markdown; of ms-swift's: swift")
    ] = False,
) -> None:
    """Translate what was written for verl or ms-swift into a run file, and tell what became of each key."""
    with told():
        from trainer.flags.table import SWIFT
        from trainer.verl.table import VERL
        from trainer.verl.told import report, run_file
        from trainer.verl.told import table as all_keys

        if table:
            sys.stdout.write(all_keys(SWIFT if words == ["swift"] else VERL) + "\n")
            return
        if not words:
            raise ConfigError("nothing is named", field="translate", remedy="name a YAML file, a script, or a command")
        found = translated(words)
        sys.stderr.write(report(found) + "\n")
        if out is None:
            sys.stdout.write(run_file(found))
        else:
            _write(out, run_file(found))


def _write(out: Path, text: str) -> None:
    if out.exists():
        raise ConfigError("is there already", file=out, field="--out", remedy="name another file")
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(text, encoding="utf-8")
    sys.stderr.write(f"\nwritten: {out}; look at it with: mtrl-train --config {out} --dry-run\n")


def translated(words: list[str]) -> Translation:
    """Whose it is, is told by what it says."""
    from trainer.flags import written as swift
    from trainer.flags.table import SWIFT
    from trainer.verl import written as verl
    from trainer.verl.translate import translate as made

    if swift.is_swift(words):
        return made(swift.of_words(words), SWIFT)
    return made(verl.of_words(words))


def settings_of(words: list[str]) -> dict[str, Any]:
    """The settings of what was written for another trainer, told as they are found."""
    from trainer.verl.told import report

    found = translated(words)
    sys.stderr.write(report(found) + "\n\n")
    return dict(found.settings)
