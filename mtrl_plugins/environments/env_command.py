"""The commands `env install`, `list`, `where` and `remove`: interpreters for environments of other frameworks."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from trainer.cli.errors import report_errors
from trainer.cli.options import app

env_app = typer.Typer(
    no_args_is_help=True,
    help="Install Gymnasium, TextArena, OpenEnv or verifiers, each in a Python of its own.",
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(env_app, name="env")
Framework = Annotated[str, typer.Argument(metavar="FRAMEWORK", help="gymnasium, textarena, openenv or verifiers.")]


def _print(text: str) -> None:
    sys.stdout.write(f"{text}\n")


@env_app.command()
def install(
    framework: Framework,
    add: Annotated[
        list[str] | None, typer.Option(metavar="PACKAGE", help="A further package, as pip takes it. May be repeated.")
    ] = None,
    python: Annotated[
        str | None, typer.Option(metavar="PATH", help="The Python to make it with. Default: the one that runs mtrl.")
    ] = None,
) -> None:
    """Install a tested release of a framework into a virtual environment in your data folder.

    It takes 100 MB (textarena) to 500 MB (verifiers), from PyPI or wherever pip is told to look. Where it is installed
    already, packages are added, and the release is brought to the tested one.

    mtrl-train env install gymnasium

    mtrl-train env install gymnasium --add pygame --add ale-py

    mtrl-train env install verifiers --add ./my_environment

    mtrl-train env install textarena --python python3.12
    """
    with report_errors():
        from mtrl_plugins.environments.interpreters import install_interpreter

        interpreter = install_interpreter(framework, add or [], _print, python)
        _print(f"installed: {', '.join(interpreter.packages)} ({interpreter.megabytes} MB in {interpreter.folder})")
        if framework == "openenv":
            _print(f"start a server with: {interpreter.python} -m uvicorn MODULE:app --port 8000")
            _print("use it in a run file as: environment: openenv:http://localhost:8000")
        else:
            _print(f"use it in a run file as: environment: {framework}:NAME")


@env_app.command("list")
def list_installed() -> None:
    """List the frameworks, and what is installed of each."""
    with report_errors():
        from mtrl_plugins.environments.interpreters import RELEASES, find_interpreter

        for framework in RELEASES:
            interpreter, text = find_interpreter(framework), "not installed"
            if interpreter is not None:
                size = f"{interpreter.megabytes} MB in {interpreter.folder}"
                text = f"{', '.join(interpreter.packages)} (Python {interpreter.version or 'unknown'}, {size})"
                if interpreter.outdated:
                    text += f"; tested is {RELEASES[framework][0]}: run `mtrl-train env install {framework}`"
            _print(f"{framework:<10} {text}")


@env_app.command()
def where(framework: Framework) -> None:
    """Print the path of a framework's Python. Fails if it is not installed."""
    with report_errors():
        from mtrl_plugins.environments.interpreters import check_framework, require_interpreter

        check_framework(framework)
        _print(str(require_interpreter(framework)))


@env_app.command()
def remove(framework: Framework) -> None:
    """Delete a framework's virtual environment."""
    with report_errors():
        from mtrl_plugins.environments.interpreters import find_interpreter, remove_interpreter

        interpreter = find_interpreter(framework)
        size = f" ({interpreter.megabytes} MB)" if interpreter is not None else ""
        _print(f"{framework} is removed{size}" if remove_interpreter(framework) else f"{framework} was not installed")
