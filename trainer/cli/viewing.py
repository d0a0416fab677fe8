"""Looking at runs on a page: served here, or left as one file."""

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
from trainer.cli.options import ASKED, app
from trainer.cli.told import told

PORT = 8766
"""Beside the gateway's."""


@app.command(rich_help_panel=ASKED)
def view(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders of runs, as runs/NAME.")],
    export: Annotated[Path | None, typer.Option(metavar="FILE", help="One HTML file with all of it instead.")] = None,
    rollout: Annotated[list[int] | None, typer.Option(help="With --export: this one, token by token.")] = None,
    host: Annotated[str, typer.Option(help="The address to listen on; any but loopback needs a token.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 takes a free one.")] = PORT,
    token_file: Annotated[Path | None, typer.Option(metavar="FILE", help="Holds the token that callers need.")] = None,
) -> None:
    """Serve a page for runs, while they go on and afterwards: curves, rollouts, tokens. Ctrl-C ends it."""
    import anyio

    with told():
        missing = [folder for folder in runs if not folder.is_dir()]
        if missing:
            remedy = "name the folder of a run, as runs/NAME"
            raise ConfigError("there is no such folder", file=missing[0], remedy=remedy)
        from gateway.http.settings import Settings, read_token
        from trainer.page.runs import named

        shown = named(runs)
        if export is not None:
            from trainer.page.export import export as write

            sys.stdout.write(f"{write(shown, export, rollout or ())}\nin {export}\n")
            return
        from trainer.page.serve import serve_until_signal

        token = None if token_file is None else read_token(token_file)
        settings = Settings(host=host, port=port, token=token)
        anyio.run(partial(serve_until_signal, shown, settings, say))


@contextmanager
def viewed(run: Path) -> Iterator[None]:
    """The page of a run beside its training; where somebody sits at a terminal it stays until they have read it."""
    from gateway.http.settings import Settings
    from trainer.page.runs import named
    from trainer.page.serve import beside

    shown = named([run])
    with ExitStack() as stack:
        try:
            url = stack.enter_context(beside(shown, Settings(port=PORT)))
        except ConfigError:  # Another page is served there.
            url = stack.enter_context(beside(shown, Settings(port=0)))
        say(url)
        yield
        if sys.stdin.isatty() and sys.stdout.isatty():
            sys.stdout.write(f"mtrl-train: the page is still there: {url} (Ctrl-C ends it)\n")
            with suppress(KeyboardInterrupt):
                Event().wait()


def say(url: str) -> None:
    """Where it is, and in a browser if somebody sits in front of one."""
    sys.stdout.write(f"mtrl-train: {url}\n")
    sys.stdout.flush()
    if shows():
        import webbrowser

        webbrowser.open(url)


def shows() -> bool:
    """Whether there is a screen, and somebody at a terminal."""
    import os

    here = sys.platform in ("darwin", "win32") or bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))
    return here and sys.stdout.isatty()
