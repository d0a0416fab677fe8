"""`mtrl-train view` and `--view`: the web UI for runs."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from threading import Event
from typing import Annotated

import typer

from gateway.errors import ConfigError
from trainer.cli.errors import report_errors
from trainer.cli.options import RUN_PANEL, TrainOption, add_train_option, app

VIEW_PORT = 8766
"""The port after the gateway's default."""


@app.command(rich_help_panel=RUN_PANEL)
def view(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders of runs, such as runs/NAME.")],
    host: Annotated[str, typer.Option(help="Address to listen on; other than loopback needs a token.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 for a free one.")] = VIEW_PORT,
    token_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="File with the token that clients need.")
    ] = None,
) -> None:
    """Serve the web UI for running and finished runs: curves, rollouts, tokens. Stop with Ctrl-C."""
    import anyio

    with report_errors():
        missing = [folder for folder in runs if not folder.is_dir()]
        if missing:
            remedy = "name the folder of a run, such as runs/NAME"
            raise ConfigError("there is no such folder", file=missing[0], remedy=remedy)
        from gateway.http.settings import Settings, read_token
        from mtrl_plugins.web.runs import name_runs

        shown = name_runs(runs)
        from mtrl_plugins.web.app import serve_until_signal

        token = None if token_file is None else read_token(token_file)
        settings = Settings(host=host, port=port, token=token)
        anyio.run(partial(serve_until_signal, shown, settings, announce_url))


@contextmanager
def serve_while_training(run: Path) -> Iterator[None]:
    """Serves the web UI of a run during its training; at a terminal, until Ctrl-C after its end."""
    from gateway.http.settings import Settings
    from mtrl_plugins.web.app import serve_in_thread
    from mtrl_plugins.web.runs import name_runs

    shown = name_runs([run])
    with ExitStack() as stack:
        try:
            url = stack.enter_context(serve_in_thread(shown, Settings(port=VIEW_PORT)))
        except ConfigError:  # The port is in use.
            url = stack.enter_context(serve_in_thread(shown, Settings(port=0)))
        announce_url(url)
        yield
        if sys.stdin.isatty() and sys.stdout.isatty():
            sys.stdout.write(f"mtrl-train: the web UI is still at {url} (stop with Ctrl-C)\n")
            with suppress(KeyboardInterrupt):
                Event().wait()


def announce_url(url: str) -> None:
    """Prints the URL of the web UI, and opens it in a browser if there is a display."""
    sys.stdout.write(f"mtrl-train: {url}\n")
    sys.stdout.flush()
    if has_display():
        import webbrowser

        webbrowser.open(url)


def has_display() -> bool:
    """True if there is a graphical display and standard output is a terminal."""
    import os

    has_screen = sys.platform in ("darwin", "win32") or bool(
        os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
    )
    return has_screen and sys.stdout.isatty()


add_train_option(
    TrainOption(
        name="--view", help="Serve the web UI while the run trains", is_flag=True, accompany=serve_while_training
    )
)
