"""Commands that show a run: `show`, `why` and `plot` in the terminal, `view` in the web UI."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gateway.errors import ConfigError, GatewayError
from trainer.cli.errors import report_errors
from trainer.cli.options import RUN_PANEL, RunFolder, app

if TYPE_CHECKING:
    from trainer.rollout.settings import TemplateSettings


@app.command(rich_help_panel=RUN_PANEL)
def show(
    run: RunFolder,
    rollout: Annotated[int | None, typer.Argument(help="Number of a rollout, to show it token by token.")] = None,
) -> None:
    """Show a run's rollouts, or one of them with its tokens coloured by author."""
    from rich.console import Console

    from trainer.storage.rollout_file import Rollouts
    from trainer.storage.token_credit import CreditReader
    from trainer.view.show import print_rollouts as print_run
    from trainer.view.why import RolloutCredit

    with report_errors(IndexError):
        rollouts = Rollouts(run)
        if rollout is None:
            return print_run(rollouts, Console())
        credited = RolloutCredit.load(rollouts[rollout], CreditReader(run))
        print_run(rollouts, Console(), rollout=rollout, decode=_load_decoder(run), credited=credited)


@app.command(rich_help_panel=RUN_PANEL)
def why(
    run: RunFolder,
    rollout: Annotated[int, typer.Argument(help="The rollout's number in `show`.")],
    token: Annotated[int, typer.Argument(help="The token's index in the rollout, from 0.")],
    ledger: Annotated[int, typer.Option(help="The ledger's number in `show`, if there are several.")] = -1,
) -> None:
    """Show who wrote a token, in which turn, under which policy version, and why it is trained or not."""
    from trainer.storage.rollout_file import Rollouts
    from trainer.storage.token_credit import CreditReader
    from trainer.view.why import RolloutCredit, explain_token

    with report_errors(IndexError):
        rollouts = Rollouts(run)
        credited = RolloutCredit.load(rollouts[rollout], CreditReader(run))
        sys.stdout.write(f"{explain_token(rollouts, rollout, token, _load_decoder(run), credited, ledger)}\n")


@app.command(rich_help_panel=RUN_PANEL)
def plot(
    run: RunFolder,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A PNG or .svg. Default: curves.png in the run")
    ] = None,
) -> None:
    """Draw a training run's curves, in the terminal and as a PNG or SVG."""
    from rich.console import Console

    from trainer.view.plot import plot_run

    with report_errors():
        plot_run(run, out, Console())


def _load_decoder(run: Path) -> Any:
    """The decode function of the run's tokenizer; None if the model is gone."""
    from trainer.setup import load_template
    from trainer.template import TemplateError

    try:
        return load_template(*_read_model_and_template(run)).tokenizer.decode
    except (GatewayError, TemplateError) as error:
        sys.stderr.write(f"mtrl-train: shown without text: {error}\n")
        return None


def _read_model_and_template(run: Path) -> tuple[Path, TemplateSettings]:
    """The model and the template settings of a run, or of the run that an evaluation belongs to."""
    from trainer.rollout.settings import TemplateSettings
    from trainer.storage.run_files import RUN_INFO_FILE, find_run_folder

    try:
        about = json.loads((find_run_folder(run) / RUN_INFO_FILE).read_text(encoding="utf-8"))
        settings = about["settings"]
        return Path(about.get("model", settings["model"])), TemplateSettings.model_validate(settings["template"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        remedy = "name a folder that `mtrl-train --out` or `mtrl-train rollout --out` wrote"
        raise ConfigError(f"is not a run ({type(error).__name__})", file=run, remedy=remedy) from error


VIEW_PORT = 8766
"""The port after the gateway's default."""


@app.command(rich_help_panel=RUN_PANEL)
def view(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders of runs, such as runs/NAME.")],
    export: Annotated[Path | None, typer.Option(metavar="FILE", help="Write one HTML file instead of serving.")] = None,
    rollout: Annotated[
        list[int] | None, typer.Option(help="With --export: include this rollout token by token.")
    ] = None,
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
        from trainer.web.runs import name_runs

        shown = name_runs(runs)
        if export is not None:
            from trainer.web.export import export_runs as export_runs

            sys.stdout.write(f"{export_runs(shown, export, rollout or ())}\nin {export}\n")
            return
        from trainer.web.app import serve_until_signal

        token = None if token_file is None else read_token(token_file)
        settings = Settings(host=host, port=port, token=token)
        anyio.run(partial(serve_until_signal, shown, settings, announce_url))


@contextmanager
def serve_while_training(run: Path) -> Iterator[None]:
    """Serves the web UI of a run during its training; at a terminal, until Ctrl-C after its end."""
    from gateway.http.settings import Settings
    from trainer.web.app import serve_in_thread
    from trainer.web.runs import name_runs

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
