"""Commands that show runs in the terminal: `show`, `why` and `compare`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gateway.errors import ConfigError, OperatorError
from trainer.cli.errors import print_line, report_errors
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
    from trainer.view.show import print_rollout, print_table
    from trainer.view.why import RolloutCredit

    with report_errors(IndexError):
        rollouts = Rollouts(run)
        if rollout is None:
            return print_table(rollouts, Console())
        credited = RolloutCredit.load(rollouts[rollout], CreditReader(run))
        print_rollout(rollouts[rollout], rollout, Console(), _load_decoder(run), credited)


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
def compare(
    first: Annotated[Path, typer.Argument(metavar="A", help="A run that was evaluated, or a folder with rollouts.")],
    second: Annotated[Path, typer.Argument(metavar="B", help="Another one, on the same tasks.")],
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object, with every task that changed.")] = False,
) -> None:
    """Compare two evaluations task by task: which tasks flipped, the difference with its interval, and a p-value.

    mtrl-train compare runs/a runs/b                                        after training, sampled and greedy

    mtrl-train compare runs/a/eval/sampled_before runs/a/eval/sampled       any two evaluations
    """
    from rich.console import Console

    from trainer.view.compare_runs import compare_runs, print_comparison, to_json

    with report_errors():
        comparisons = compare_runs(first, second)
        if json:
            sys.stdout.write(to_json(comparisons) + "\n")
            return
        for name, comparison in comparisons.items():
            print_comparison(name, comparison, Console())


def _load_decoder(run: Path) -> Any:
    """The decode function of the run's tokenizer; None if the model is gone."""
    from trainer.setup import load_template

    try:
        return load_template(*_read_model_and_template(run)).tokenizer.decode
    except OperatorError as error:
        print_line(f"shown without text: {error}")
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
