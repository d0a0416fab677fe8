"""The command `plan`, which simulates a run on devices that need not be there."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gateway.errors import ConfigError
from trainer.cli.errors import report_errors
from trainer.cli.options import app, find_jobs

if TYPE_CHECKING:
    from trainer.train.settings import TrainSettings


@app.command(rich_help_panel="Before a run")
def plan(
    target: Annotated[str, typer.Argument(metavar="FILE|JOB|RUN", help="A run file, a job, or the folder of a run.")],
    gpus: Annotated[int, typer.Option(min=1, help="Number of devices.")] = 8,
    device: Annotated[str, typer.Option(help="Their kind, such as h100.")] = "h100",
    source: Annotated[
        list[Path] | None, typer.Option("--from", metavar="RUN", help="A finished run to draw rollouts from.")
    ] = None,
    servers_tp: Annotated[int, typer.Option(min=1, help="Devices of each server (its --tp).")] = 1,
    tool_seconds: Annotated[
        float | None, typer.Option(min=0.0, metavar="S", help="Plan as if every tool took this long.")
    ] = None,
    seed: Annotated[int, typer.Option(help="The same seed gives the same plan.")] = 0,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Simulate a run on other devices: which split between trainer and engines, and which mode, is fastest.

    mtrl-train plan run.yaml --gpus 64 --device h100                   with stated assumptions

    mtrl-train plan run.yaml --gpus 64 --device h100 --from runs/mine  with the turns and tools of a run
    """
    with report_errors():
        settings, model, runs = _find_target(target, source or [])
        from rich.console import Console

        from mtrl_plugins.plan.plan_run import PlanOptions, plan_run
        from mtrl_plugins.plan.report import plan_to_json, print_plan
        from trainer.setup import trust_model

        trust_model(settings, model)
        planned = plan_run(settings, model, runs, PlanOptions(gpus, device, servers_tp, tool_seconds, seed))
        if json:
            sys.stdout.write(plan_to_json(planned) + "\n")
        else:
            print_plan(planned, Console())


def _find_target(target: str, runs: list[Path]) -> tuple[TrainSettings, Path, list[Path]]:
    """The settings, the model's folder, and the runs to draw rollouts from: a run as the target is one itself."""
    if Path(target).is_dir():
        from trainer.storage.run_files import read_run_info
        from trainer.train.run_folder import load_run_settings

        folder = Path(target)
        settings = load_run_settings(folder)
        return settings, Path(read_run_info(folder).get("model", settings.model)), runs or [folder]
    from trainer.cli.run_file import fetch_model, find_run_file, load_settings
    from trainer.train.settings import TrainSettings

    if not Path(target).exists() and target not in find_jobs():
        remedy = f"name a YAML file, the folder of a run, or one of {', '.join(sorted(find_jobs()))}"
        raise ConfigError("there is no such run file or run", file=target, remedy=remedy)
    settings = fetch_model(load_settings(TrainSettings, find_run_file(target), {}))
    return settings, _prepare_model(settings), runs


def _prepare_model(settings: TrainSettings) -> Path:
    """The model's folder; a demo's model is built if it does not exist yet."""
    import anyio
    from rich.console import Console

    from trainer.train.job import prepare_model
    from trainer.view.progress import show_warm_start

    with show_warm_start(Console(stderr=True)) as on_progress:
        return anyio.run(partial(prepare_model, settings, on_progress))
