"""The command `init`, which writes the folder of a new job."""

from __future__ import annotations

import sys
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated

import typer

from gateway.errors import ConfigError
from gateway.plugins import find_missing
from trainer.cli.errors import report_errors
from trainer.cli.options import app

if TYPE_CHECKING:
    from mtrl_plugins.scripts.translate import Translation

FRAMEWORKS = ("trl", "verl", "swift")


@app.command(rich_help_panel="Before a run")
def init(
    name: Annotated[str, typer.Argument(metavar="FOLDER", help="The new job's folder.")],
    model: Annotated[
        str | None, typer.Option(metavar="PATH", help="A model's folder. Default: a tiny model that learns in a minute")
    ] = None,
    source: Annotated[
        tuple[str, str],
        typer.Option(
            "--from",
            metavar="trl|verl|swift FILE",
            help="Take settings from a script or YAML file for another framework.",
        ),
    ] = ("", ""),
) -> None:
    """Write a job to start from: run file, tool, MCP server, reward, interaction, ten tasks, tests and a README.

    mtrl-train init my_job                           runs at once, with a tiny model

    mtrl-train init my_job --model models/Qwen3-0.6B your model

    mtrl-train init my_job --from verl train.sh      with the settings of a script for verl

    Every line of the run file is explained in it. Nothing is overwritten.
    """
    with report_errors(stopped=lambda: "nothing was written"):
        for needed in ("demo", "scripts", source[0]):
            if plugin := find_missing(needed):
                remedy = "install mtrl with all its plug-ins"
                raise ConfigError(f"`init` needs the plug-in {plugin!r}, which is not installed", remedy=remedy)
        from mtrl_plugins.starter.write_job import write_job

        if not name:
            raise ConfigError("is empty", field="FOLDER", remedy="name a new folder")
        folder = Path(name)
        framework, file = source
        translation = _translate(framework, file) if framework or file else None
        run_file = (
            write_job(folder, model)
            if translation is None
            else write_job(folder, model, translation.settings, translation.sources)
        )
    place, run = quote(str(folder)), quote(str(run_file))
    width = len(f"mtrl-train --config {run} --dry-run")
    steps = {
        f"mtrl-train --config {run} --dry-run": "check everything; nothing is trained",
        f"mtrl-train --config {run}": "train",
        f"pytest {place}": "the tests of its tool, server, interaction and reward",
    }
    sys.stdout.write(f"{folder} is a job; {folder / 'README.md'} says what is in it\n")
    sys.stdout.writelines(f"  {command:{width}}  {what}\n" for command, what in steps.items())


def _translate(framework: str, file: str) -> Translation:
    """Translates a file of another framework, and prints how each of its keys was translated."""
    if framework not in FRAMEWORKS:
        remedy = f"write --from {'|'.join(FRAMEWORKS)} FILE"
        raise ConfigError(f"{framework!r} is no framework that can be translated", field="--from", remedy=remedy)
    if not Path(file).is_file():
        raise ConfigError("there is no such file", file=file, field="--from", remedy="correct the path")
    from mtrl_plugins.scripts.script_reader import is_swift
    from mtrl_plugins.scripts.translate import format_report
    from mtrl_plugins.scripts.translate_command import refuse_run_file, translate_command

    refuse_run_file(Path(file))
    if framework == "trl":
        from mtrl_plugins.trl.read_trl_file import translate_trl_file

        translation = translate_trl_file(Path(file))
    else:
        if is_swift([file]) != (framework == "swift"):
            other = "verl" if framework == "swift" else "swift"
            problem = f"is not for {framework}: it has {'no' if framework == 'swift' else 'a'} command of ms-swift"
            raise ConfigError(problem, file=file, field="--from", remedy=f"write --from {other} {file}")
        translation = translate_command([file])
    sys.stderr.write(format_report(translation) + "\n\n")
    return translation
