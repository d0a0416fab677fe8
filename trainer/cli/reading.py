"""Reading a run from the command line: its rollouts, its tokens, its curves."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gateway.errors import ConfigError, GatewayError
from trainer.cli.options import ASKED, Run, app
from trainer.cli.told import told

if TYPE_CHECKING:
    from trainer.config import TemplateSettings


@app.command(rich_help_panel=ASKED)
def show(
    run: Run,
    rollout: Annotated[int | None, typer.Argument(help="One rollout by its number, token by token.")] = None,
) -> None:
    """Show a run's rollouts, or one of them with its tokens coloured by author."""
    from rich.console import Console

    from trainer.run.credits import Credits
    from trainer.run.file import Rollouts
    from trainer.view.credited import Credited
    from trainer.view.show import show as print_run

    with told(IndexError):
        rollouts = Rollouts(run)
        if rollout is None:
            return print_run(rollouts, Console())
        credited = Credited.of(rollouts[rollout], Credits(run))
        print_run(rollouts, Console(), rollout=rollout, decode=_decode(run), credited=credited)


@app.command(rich_help_panel=ASKED)
def why(
    run: Run,
    rollout: Annotated[int, typer.Argument(help="The rollout's number, as `show` counts.")],
    token: Annotated[int, typer.Argument(help="The token's place in it, from 0.")],
    ledger: Annotated[int, typer.Option(help="Where the policy began anew: which ledger, as `show` counts.")] = -1,
) -> None:
    """Say who wrote a token, in which turn, under which policy version, and why it is (not) trained."""
    from trainer.run.credits import Credits
    from trainer.run.file import Rollouts
    from trainer.view.credited import Credited
    from trainer.view.why import why as ask

    with told(IndexError):
        rollouts = Rollouts(run)
        credited = Credited.of(rollouts[rollout], Credits(run))
        sys.stdout.write(f"{ask(rollouts, rollout, token, _decode(run), credited, ledger)}\n")


@app.command(rich_help_panel=ASKED)
def plot(
    run: Run,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A PNG or .svg. Default: curves.png in the run")
    ] = None,
) -> None:
    """Draw a training run's curves, in the terminal and as a PNG or SVG."""
    from rich.console import Console

    from trainer.view.plot import plot as draw

    with told():
        draw(run, out, Console())


def _decode(run: Path) -> Any:
    """The run's own tokenizer, where it is still there."""
    from trainer.stage import template_of
    from trainer.template import TemplateError

    try:
        return template_of(*_spoken(run)).tokens.decode
    except (GatewayError, TemplateError) as error:
        sys.stderr.write(f"mtrl-train: shown without text: {error}\n")
        return None


def _spoken(run: Path) -> tuple[Path, TemplateSettings]:
    """The model and the template of a run, or of the one whose evaluation it is."""
    from trainer.config import TemplateSettings
    from trainer.run.about import ABOUT, run_of

    try:
        about = json.loads((run_of(run) / ABOUT).read_text(encoding="utf-8"))
        settings = about["settings"]
        return Path(about.get("model", settings["model"])), TemplateSettings.model_validate(settings["template"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        remedy = "name a folder that `mtrl-train --out` or `mtrl-train rollout --out` made"
        raise ConfigError(f"is no run ({type(error).__name__})", file=run, remedy=remedy) from error
