"""Training from the command line: the command without a name, and asking what a run has learned."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

from trainer.cli.options import Mcp, Run, app
from trainer.cli.told import told

if TYPE_CHECKING:
    from rich.console import Console

    from trainer.train.settings import TrainSettings

Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Log to standard error what happens.")]


class Aside(logging.StreamHandler[TextIO]):
    """To standard error as it is now: while a panel is shown, it stands in for it and writes above itself."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


@app.callback(invoke_without_command=True)
def train(
    context: typer.Context,
    tools: Annotated[str | None, typer.Option(metavar="DIR|URL", help="Tools. Default: tool_configs")] = None,
    mcp: Mcp = None,
    config: Annotated[str | None, typer.Option(metavar="FILE|JOB", help="Run file, or a shipped job's name.")] = None,
    model: Annotated[str | None, typer.Option(metavar="PATH", help="Folder of a model. Default: a tiny one")] = None,
    data: Annotated[str | None, typer.Option(metavar="FILE", help="Tasks: JSONL, parquet, or a data set.")] = None,
    engine: Annotated[str | None, typer.Option(metavar="auto|torch|sglang|URL", help="What writes.")] = None,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="The run's folder. Default: next in runs/")] = None,
    steps: Annotated[int | None, typer.Option(help="Steps of the run.")] = None,
    seed: Annotated[int | None, typer.Option(help="The same seed gives the same run.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with --out, or with the newest run.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Look at everything, show it, and train nothing.")] = False,
    verbose: Verbose = False,
) -> None:
    """Train language models to use tools: rollouts over many turns, exact to the token.

    Without a command it trains. `mtrl-train --tools tool_configs/` makes a tiny model and lets you watch it learn.
    """
    level = logging.INFO if verbose else logging.WARNING
    logging.basicConfig(level=level, format="%(levelname)s %(name)s: %(message)s", handlers=[Aside()])
    given: dict[str, Any] = {
        "tools": tools, "mcp": mcp, "model": model, "data": data, "engine": engine,
        "out": out, "steps": steps, "seed": seed,
    }  # fmt: skip
    asked = config is not None or resume or dry_run or any(value is not None for value in given.values())
    if context.invoked_subcommand is not None:
        if asked:
            raise typer.BadParameter(f"write options of {context.invoked_subcommand!r} behind it")
        return
    with told():
        _train(given, config, resume=resume, dry_run=dry_run)


def _train(given: dict[str, Any], config: str | None, *, resume: bool, dry_run: bool) -> None:
    settings, name = _chosen(given, config, resume=resume)  # What is wrong there is told before torch is awake.

    import anyio
    from rich.console import Console

    from trainer.train.dry import dry_run as look
    from trainer.train.folder import ABOUT
    from trainer.train.start import folder_of
    from trainer.train.start import train as begin

    console = Console()
    if dry_run:
        if not anyio.run(look, settings, console):
            raise typer.Exit(1)
        return
    folder = folder_of(settings, name, resume=resume)

    async def main() -> None:
        await begin(settings, folder, console, resume=resume)

    def stopped() -> str:
        begun = (folder / ABOUT).exists()
        return f"go on with: mtrl-train --resume --out {quote(str(folder))}" if begun else "nothing had begun"

    with told(stopped=stopped):
        anyio.run(main)
    _next(folder, console)


def _next(folder: Path, console: Console) -> None:
    """Where things are, and what to ask them."""
    from trainer.train.checkpoint import Checkpoints
    from trainer.train.folder import settings_of

    found, run = Checkpoints(folder).latest(), quote(str(folder))
    if found is None:
        return
    asks = {
        f"plot {run}": "its curves",
        f"eval {run}": "success before and after, on tasks that it was not trained on",
        f"show {run}": "its rollouts; with a number behind it, one of them token by token",
    }
    if settings_of(folder).record:
        asks[f"replay {run} {found.step}"] = "the last step once more, from its tape"
    console.print(f"{found.step} steps are over; the model is {found.folder}", markup=False, soft_wrap=True)
    width = max(map(len, asks))
    for ask, what in asks.items():
        console.print(f"  mtrl-train {ask:{width}}  {what}", markup=False, soft_wrap=True, highlight=False)


def _chosen(given: dict[str, Any], config: str | None, *, resume: bool) -> tuple[TrainSettings, str]:
    """The run's settings, and the name that it goes by. What goes on has those that it began with."""
    from trainer.cli.settings import job, validated
    from trainer.train.folder import newest, settings_of
    from trainer.train.settings import DEFAULT, TrainSettings

    if resume and config is None:
        before = settings_of(given["out"] or newest()).model_dump()
        typed = {name: value for name, value in given.items() if value is not None}
        return validated(TrainSettings, None, before | typed), ""
    if config is None and given["model"] is None and given["data"] is None:
        config = DEFAULT
    file = job(config) if config is not None else None
    name = file.stem if file else Path(given["model"] or given["data"]).stem
    return validated(TrainSettings, file, given), name


@app.command("eval")
def evaluate(
    run: Run,
    rows: Annotated[int | None, typer.Option(help="Tasks to try. Default: as the run says")] = None,
    data: Annotated[str | None, typer.Option(metavar="FILE", help="Other tasks than the run's own.")] = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON object, for programs.")] = False,
) -> None:
    """Success before and after, sampled and by the likeliest tokens, by kind of task, with 95 % intervals."""
    import anyio
    from rich.console import Console

    from trainer.train.compare import compare

    async def main() -> None:
        comparison = await compare(run, rows, data, Console(stderr=True))
        if json:
            sys.stdout.write(comparison.json + "\n")
        else:
            Console().print(comparison.table)

    with told():
        anyio.run(main)
