"""The command `init`, which writes the folder of a new job."""

from __future__ import annotations

import sys
from pathlib import Path
from shlex import quote
from typing import Annotated

import typer

from gateway.errors import ConfigError
from gateway.plugins import find_missing
from trainer.cli.errors import report_errors
from trainer.cli.options import app


@app.command(rich_help_panel="Before a run")
def init(
    name: Annotated[str, typer.Argument(metavar="FOLDER", help="The new job's folder.")],
    model: Annotated[
        str | None, typer.Option(metavar="PATH", help="A model's folder. Default: a tiny model that learns in a minute")
    ] = None,
) -> None:
    """Write a job to start from: run file, tool, MCP server, reward, interaction, ten tasks, tests and a README.

    mtrl-train init my_job                           runs at once, with a tiny model

    mtrl-train init my_job --model models/Qwen3-0.6B your model

    Every line of the run file is explained in it. Nothing is overwritten.
    """
    with report_errors(stopped=lambda: "nothing was written"):
        for needed in ("demo", "scripts"):
            if plugin := find_missing(needed):
                remedy = "install mtrl with all its plug-ins"
                raise ConfigError(f"`init` needs the plug-in {plugin!r}, which is not installed", remedy=remedy)
        from mtrl_plugins.starter.write_job import write_job

        if not name:
            raise ConfigError("is empty", field="FOLDER", remedy="name a new folder")
        folder = Path(name)
        run_file = write_job(folder, model)
    place, run = quote(str(folder)), quote(str(run_file))
    width = len(f"mtrl-train --config {run} --dry-run")
    steps = {
        f"mtrl-train --config {run} --dry-run": "check everything; nothing is trained",
        f"mtrl-train --config {run}": "train",
        f"pytest {place}": "the tests of its tool, server, interaction and reward",
    }
    sys.stdout.write(f"{folder} is a job; {folder / 'README.md'} says what is in it\n")
    sys.stdout.writelines(f"  {command:{width}}  {what}\n" for command, what in steps.items())
