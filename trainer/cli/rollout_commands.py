"""Commands `rollout` and `replay`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from gateway.errors import ConfigError
from trainer.cli.errors import report_errors
from trainer.cli.options import RUN_PANEL, EnvironmentOption, McpOption, OverrideWords, RunFolder, app


@app.command()
def rollout(
    overrides: OverrideWords = None,
    model: Annotated[str | None, typer.Option(metavar="PATH", help="A model's folder, or org/name of the hub.")] = None,
    data: Annotated[str | None, typer.Option(metavar="FILE", help="Tasks: JSONL, parquet, or a dataset.")] = None,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Folder for the rollouts, such as runs/NAME.")] = None,
    tools: Annotated[str | None, typer.Option(metavar="DIR|URL", help="Default: tool_configs")] = None,
    mcp: McpOption = None,
    engine: Annotated[str | None, typer.Option(metavar="auto|torch|sglang|URL", help="Inference engine.")] = None,
    n: Annotated[int | None, typer.Option("--n", help="Rollouts per task. Default: 4")] = None,
    rows: Annotated[int | None, typer.Option(help="Number of tasks, from the first on.")] = None,
    seed: Annotated[int | None, typer.Option(help="The same seed gives the same rollouts.")] = None,
    environment: EnvironmentOption = None,
    record: Annotated[bool | None, typer.Option("--record", help="Record a tape for `replay`.")] = None,
    config: Annotated[Path | None, typer.Option(metavar="FILE", help="YAML with these and other settings.")] = None,
) -> None:
    """Collect and score rollouts, saved as they end. Exits with 1 if no rollout was scored."""
    import anyio
    from rich.console import Console

    options: dict[str, Any] = {
        "model": model, "data": data, "out": out, "tools": tools, "mcp": mcp,
        "engine": engine, "n": n, "rows": rows, "seed": seed, "environment": environment, "record": record,
    }  # fmt: skip
    with report_errors():
        from trainer.cli.run_file import fetch_model, load_settings
        from trainer.collect_rollouts import collect_rollouts
        from trainer.rollout.settings import RolloutSettings

        settings = fetch_model(load_settings(RolloutSettings, config, options, overrides=overrides or ()))
        console = Console()
        scored = anyio.run(collect_rollouts, settings, console)
        run = settings.out
        console.print(f"saved in {run}; read it with: mtrl-train show {run}", soft_wrap=True, markup=False)
    if not scored:
        raise typer.Exit(1)


@app.command(rich_help_panel=RUN_PANEL)
def replay(
    run: RunFolder, step: Annotated[int | None, typer.Argument(help="The step to replay, for a training run.")] = None
) -> None:
    """Replay a recorded run from its tape, without engine, network or API keys, and compare every token id.

    For a training run, replay one step and compare token ids, rewards and loss.
    """
    import anyio
    from rich.console import Console

    with report_errors():
        if step is None:
            from trainer.storage.run_files import METRICS_FILE as METRICS

            if (run / METRICS).exists():
                remedy = f"name the step to replay: mtrl-train replay {run} STEP"
                raise ConfigError("is a training run", file=run, remedy=remedy)
            from trainer.replay_rollouts import replay_rollouts

            same = anyio.run(replay_rollouts, run, Console())
        else:
            from trainer.train.replay_step import replay_step

            same = anyio.run(replay_step, run, step, Console())
    if not same:
        raise typer.Exit(1)
