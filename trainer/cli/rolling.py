"""Rolling out from the command line: look first, roll out, play it again."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from gateway.errors import ConfigError
from trainer.cli.options import ASKED, Mcp, Run, Tools, app
from trainer.cli.told import told


@app.command()
def check(
    tools: Tools = "tool_configs",
    mcp: Mcp = None,
    model: Annotated[Path | None, typer.Option(metavar="PATH", help="Folder of a model, to be probed.")] = None,
    data: Annotated[str | None, typer.Option(metavar="FILE", help="Tasks, whose names are looked up.")] = None,
    parser: Annotated[str | None, typer.Option(help="How the model writes calls. Default: see its template")] = None,
) -> None:
    """Look at servers, template, parser, memory and one masked rollout. Exits with 1 if anything is wrong."""
    import anyio
    from rich.console import Console

    from trainer.check import check as look
    from trainer.config import RolloutSettings, TemplateSettings

    settings = RolloutSettings(
        tools=tools,
        mcp=mcp,
        model=model or Path(),
        data=data or "",
        out=Path(),
        template=TemplateSettings(parser=parser),
    )
    well: list[bool] = []

    async def main() -> None:
        well.append(await look(settings, Console(), model=model is not None, data=data is not None))

    with told():
        anyio.run(main)
    if well != [True]:
        raise typer.Exit(1)


@app.command()
def rollout(
    model: Annotated[Path | None, typer.Option(metavar="PATH", help="Folder of a model.")] = None,
    data: Annotated[str | None, typer.Option(metavar="FILE", help="Tasks: JSONL, parquet, or a data set.")] = None,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Where the rollouts go, as runs/NAME.")] = None,
    tools: Annotated[str | None, typer.Option(metavar="DIR|URL", help="Default: tool_configs")] = None,
    mcp: Mcp = None,
    engine: Annotated[str | None, typer.Option(metavar="auto|torch|sglang|URL", help="What writes.")] = None,
    n: Annotated[int | None, typer.Option("--n", help="Rollouts of each task. Default: 4")] = None,
    rows: Annotated[int | None, typer.Option(help="Only the first so many tasks.")] = None,
    seed: Annotated[int | None, typer.Option(help="The same seed gives the same rollouts.")] = None,
    record: Annotated[bool | None, typer.Option("--record", help="Keep a tape, for `replay`.")] = None,
    config: Annotated[Path | None, typer.Option(metavar="FILE", help="YAML with these and all other settings.")] = None,
) -> None:
    """Roll out and score; what is over is saved, and progress is shown. Exits with 1 if no rollout counts."""
    import anyio
    from rich.console import Console

    given: dict[str, Any] = {
        "model": model, "data": data, "out": out, "tools": tools, "mcp": mcp,
        "engine": engine, "n": n, "rows": rows, "seed": seed, "record": record,
    }  # fmt: skip
    with told():
        from trainer.cli.settings import validated
        from trainer.config import RolloutSettings
        from trainer.roll import roll

        settings = validated(RolloutSettings, config, given)

        console = Console()
        counted = anyio.run(roll, settings, console)
        run = settings.out
        console.print(f"saved in {run}; read it with: mtrl-train show {run}", soft_wrap=True, markup=False)
    if not counted:
        raise typer.Exit(1)


@app.command(rich_help_panel=ASKED)
def replay(
    run: Run,
    step: Annotated[int | None, typer.Argument(help="Of a training run: the step to make again.")] = None,
) -> None:
    """Make a recorded run again from its tape, without engine, network or key, and compare every id.

    Of a training run a step is made again: every id, every reward, and the loss.
    """
    import anyio
    from rich.console import Console

    with told():
        if step is None:
            from trainer.run.history import NAME as METRICS

            if (run / METRICS).exists():
                remedy = f"name the step to make again: mtrl-train replay {run} STEP"
                raise ConfigError("is a training run", file=run, remedy=remedy)
            from trainer.replay import replay as again

            same = anyio.run(again, run, Console())
        else:
            from trainer.train.again import again as repeated

            same = anyio.run(repeated, run, step, Console())
    if not same:
        raise typer.Exit(1)
