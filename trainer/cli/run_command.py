"""The command `run`: a Python program with the names of other frameworks that mtrl stands in for."""

from __future__ import annotations

import runpy
import sys
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from gateway.errors import ConfigError
from trainer.cli.errors import report_errors
from trainer.cli.options import app


@app.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
def run(
    program: Annotated[str, typer.Argument(metavar="FILE|MODULE", help="A file or a module.")],
    arguments: Annotated[list[str] | None, typer.Argument(metavar="[ARGUMENT]...", help="Its arguments.")] = None,
) -> None:
    """Run a Python program with stand-ins for verl and ms-swift, where they are not installed.

    mtrl-train run pytest tests/interactions     tests written for verl
    """
    with ExitStack() as stack:
        with report_errors():
            from gateway.plugins import enable_stand_ins

            is_file = program.endswith(".py")
            if is_file and not Path(program).is_file():
                raise ConfigError(
                    "there is no such file", file=program, remedy="name a Python file, or a module as `pytest`"
                )
            sys.argv[:] = [program, *(arguments or ())]
            sys.path.insert(0, str(Path(program).resolve().parent if is_file else Path.cwd()))
            stack.enter_context(enable_stand_ins(folders=[Path.cwd()]))
        try:
            if is_file:
                runpy.run_path(program, run_name="__main__")
            else:
                runpy.run_module(program, run_name="__main__", alter_sys=True)
        except SystemExit:
            _join_threads()
            raise
        _join_threads()


def _join_threads() -> None:
    """Waits for the program's threads, as Python does at its end; a command of mtrl does not wait for any."""
    while threads := [one for one in threading.enumerate() if one is not threading.main_thread() and not one.daemon]:
        threads[0].join()
