"""Commands `check`, `rollout` and `replay`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from gateway.errors import ConfigError
from trainer.cli.errors import report_errors
from trainer.cli.options import RUN_PANEL, EnvironmentOption, McpOption, OverrideWords, RunFolder, ToolsOption, app


@app.command()
def check(
    overrides: OverrideWords = None,
    tools: ToolsOption = "tool_configs",
    mcp: McpOption = None,
    model: Annotated[str | None, typer.Option(metavar="PATH", help="A model's folder, to check it as well.")] = None,
    data: Annotated[str | None, typer.Option(metavar="FILE", help="Tasks, to check their tool names.")] = None,
    parser: Annotated[str | None, typer.Option(help="Format of tool calls. Default: found from the template")] = None,
    environment: EnvironmentOption = None,
    config: Annotated[
        str | None, typer.Option(metavar="FILE", help="A run file: its agent, or a script, plays rollouts.")
    ] = None,
) -> None:
    """Check servers, template, parser, memory and one masked rollout. Exits with 1 if a check fails.

    mtrl-train check --config run.yaml runs one rollout of the run's agent, and shows what it changed, by token.
    For a run without an agent, it is the same as --dry-run.
    """
    import anyio
    from rich.console import Console

    if config is not None:
        if model is not None or data is not None:
            raise typer.BadParameter("--config names the model and the data: leave --model and --data out")
        with report_errors():
            if not anyio.run(_check_run_file, config, overrides or ()):
                raise typer.Exit(1)
        return

    from trainer.check import check as run_checks
    from trainer.cli.run_file import fetch_model, load_settings
    from trainer.rollout.settings import RolloutSettings

    with report_errors():
        values: dict[str, Any] = {"tools": tools, "mcp": mcp, "model": model or Path(), "out": Path()}
        named = {"environment": environment, "data": data if data is not None or environment else ""}
        values |= {name: value for name, value in named.items() if value is not None}
        values["template"] = {"parser": parser}
        settings = fetch_model(load_settings(RolloutSettings, None, values, overrides=overrides or ()))
    passed: list[bool] = []

    async def main() -> None:
        passed.append(await run_checks(settings, Console(), model=model is not None, data=bool(settings.data)))

    with report_errors():
        anyio.run(main)
    if passed != [True]:
        raise typer.Exit(1)


async def _check_run_file(config: str, words: Sequence[str]) -> bool:
    """Lets the run's agent play a rollout, or plays scripted ones."""
    from rich.console import Console

    from trainer.cli.run_file import fetch_model, find_run_file, load_settings
    from trainer.train.dry_run import dry_run
    from trainer.train.settings import TrainSettings

    settings = fetch_model(load_settings(TrainSettings, find_run_file(config), {}, overrides=words))
    trial = next((trial for part in settings.parts if (trial := part.find_trial())), dry_run)
    return await trial(settings, Console())


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
    run: RunFolder,
    step: Annotated[int | None, typer.Argument(help="The step to replay, for a training run.")] = None,
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
