"""Training from the command line: the command without a name, and asking what a run has learned."""

from __future__ import annotations

import logging
import sys
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from shlex import quote, split
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

from gateway.errors import ConfigError
from trainer.cli.options import ASKED, SWIFT, VERL, Run, app
from trainer.cli.told import told
from trainer.cli.viewing import viewed

if TYPE_CHECKING:
    from rich.console import Console

    from trainer.train.settings import TrainSettings


def learns(said: str, metavar: str, *names: str) -> Any:
    return typer.Option(*names, metavar=metavar, help=said, rich_help_panel="What is trained, on what")


def runs(said: str, metavar: str) -> Any:
    return typer.Option(metavar=metavar, help=said, rich_help_panel="The run")


def switch(name: str, said: str, *short: str) -> Any:
    return typer.Option(name, *short, help=said, rich_help_panel="The run")


class Aside(logging.StreamHandler[TextIO]):
    """To standard error as it is now: while a panel is shown, it stands in for it and writes above itself."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


@app.callback(invoke_without_command=True)
def train(
    context: typer.Context,
    tools: Annotated[str | None, learns("Tools. Default: tool_configs", "DIR|URL")] = None,
    mcp: Annotated[Path | None, learns("MCP servers. Default: mcp_servers.json beside --tools", "FILE")] = None,
    model: Annotated[str | None, learns("A Hugging Face model's folder. Default: a tiny one is made", "PATH")] = None,
    data: Annotated[str | None, learns("Tasks: JSONL, parquet, or a data set. Default: the tiny one's", "FILE")] = None,
    config: Annotated[str | None, learns("YAML with all settings, or a job by its name", "FILE|JOB")] = None,
    verl: Annotated[Path | None, learns("YAML or a script of verl's", "FILE [KEY=VALUE]...", VERL)] = None,
    swift: Annotated[
        str | None, learns("A script of ms-swift's, or its command in quotes", "FILE|COMMAND", SWIFT)
    ] = None,
    engine: Annotated[str | None, runs("What writes rollouts. Default: auto", "auto|torch|sglang|URL")] = None,
    mode: Annotated[str | None, runs("How far rollouts run ahead. Default: synchronous", "MODE")] = None,
    steps: Annotated[int | None, runs("Steps of the run", "N")] = None,
    seed: Annotated[int | None, runs("The same seed gives the same run", "N")] = None,
    out: Annotated[Path | None, runs("The run's folder. Default: the next one in runs/", "DIR")] = None,
    resume: Annotated[bool, switch("--resume", "Go on with --out, or with the newest run")] = False,
    view: Annotated[bool, switch("--view", "Serve the page of the run while it trains")] = False,
    dry_run: Annotated[bool, switch("--dry-run", "Look at everything, show it, and train nothing")] = False,
    verbose: Annotated[bool, switch("--verbose", "Log to standard error what happens", "-v")] = False,
) -> None:
    """Train language models to use tools: rollouts over many turns, exact to the token.

    mtrl-train --tools tool_configs/                 a tiny model learns its tools

    mtrl-train --tools DIR --model PATH --data FILE  your tools, model and tasks

    mtrl-train --config run.yaml --dry-run           look first, train nothing
    """
    level = logging.INFO if verbose else logging.WARNING
    logging.basicConfig(level=level, format="%(levelname)s %(name)s: %(message)s", handlers=[Aside()])
    given: dict[str, Any] = {
        "tools": tools, "mcp": mcp, "model": model, "data": data, "engine": engine,
        "mode": mode, "out": out, "steps": steps, "seed": seed,
    }  # fmt: skip
    asked = (
        config is not None
        or verl is not None
        or swift is not None
        or resume
        or dry_run
        or view
        or any(value is not None for value in given.values())
    )
    if context.invoked_subcommand is not None:
        if asked:
            raise typer.BadParameter(f"write options of {context.invoked_subcommand!r} behind it")
        return
    with told():
        moved = [name for name, said in ((VERL, verl), (SWIFT, swift)) if said is not None]
        if len(moved) + (config is not None or resume) > 1:
            raise ConfigError("goes without --config and --resume", field=moved[0], remedy="write one of them")
        if verl is not None:
            chosen = _moved(given, [str(verl), *(context.obj or [])], verl.stem)
        elif swift is not None:
            chosen = _moved(given, _words(swift), Path(swift).stem if Path(swift).is_file() else "swift")
        else:
            chosen = _chosen(given, config, resume=resume)
        _train(*chosen, resume=resume, dry_run=dry_run, view=view)


def _train(settings: TrainSettings, name: str, *, resume: bool, dry_run: bool, view: bool) -> None:
    """What can be told before torch is awake, which takes seconds, is told before."""
    import anyio
    from rich.console import Console

    from trainer.run.about import ABOUT
    from trainer.train.folder import folder_of

    console = Console()
    if dry_run:
        from trainer.train.dry import dry_run as look

        if not anyio.run(look, settings, console):
            raise typer.Exit(1)
        return
    folder = folder_of(settings, name, resume=resume)
    console.print(f"the run is {folder}", markup=False, highlight=False)

    def stopped() -> str:
        begun = (folder / ABOUT).exists()
        return f"go on with: mtrl-train --resume --out {quote(str(folder))}" if begun else "nothing had begun"

    with told(stopped=stopped), viewed(folder) if view else nullcontext():
        from trainer.train.start import train as begin

        anyio.run(partial(begin, settings, folder, console, resume=resume))
    _next(folder, console)


def _next(folder: Path, console: Console) -> None:
    """Where things are, and what to ask them."""
    from trainer.train.checkpoint import Checkpoints
    from trainer.train.folder import settings_of

    found, run = Checkpoints(folder).latest(), quote(str(folder))
    if found is None:
        return
    asks = {
        f"view {run}": "its page: curves, rollouts, tokens",
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


def _moved(given: dict[str, Any], words: list[str], name: str) -> tuple[TrainSettings, str]:
    """What was written for another trainer becomes, under what was typed of our own."""
    from trainer.cli.moving import settings_of
    from trainer.cli.settings import validated
    from trainer.train.settings import TrainSettings

    typed = {name: value for name, value in given.items() if value is not None}
    return validated(TrainSettings, None, settings_of(words) | typed), name


def _words(said: str) -> list[str]:
    """A file's name, or a command as a shell has it."""
    return [said] if Path(said).is_file() else split(said)


@app.command("eval", rich_help_panel=ASKED)
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
