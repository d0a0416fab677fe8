"""The trainer on the command line. What is heavy is imported by the command that needs it, so that help is quick."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gateway.errors import GatewayError, innermost
from gateway.leave import leaving

if TYPE_CHECKING:
    from trainer.config import RolloutSettings

app = typer.Typer(
    help="Train language models to use tools: rollouts over many turns, exact to the token.",
    epilog="Try: mtrl-train check --tools tool_configs/ --model PATH",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Tools = Annotated[str, typer.Option(metavar="DIR|URL", help="Folder of YAML, or a running `mtrl-gateway serve`.")]
Mcp = Annotated[Path | None, typer.Option(metavar="FILE", help="Servers file. Default: the one beside --tools")]
Run = Annotated[Path, typer.Argument(metavar="RUN", help="A folder that `rollout --out` made.")]


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
        "n": n, "rows": rows, "seed": seed, "record": record,
    }  # fmt: skip
    with told():
        settings = _settings(config, {name: value for name, value in given.items() if value is not None})
        from trainer.roll import roll

        console = Console()
        counted = anyio.run(roll, settings, console)
        run = settings.out
        console.print(f"saved in {run}; read it with: mtrl-train show {run}", soft_wrap=True, markup=False)
    if not counted:
        raise typer.Exit(1)


@app.command()
def show(
    run: Run,
    rollout: Annotated[int | None, typer.Argument(help="One rollout by its number, token by token.")] = None,
) -> None:
    """Show a run's rollouts, or one of them with its tokens coloured by author."""
    from rich.console import Console

    from trainer.run.file import Rollouts
    from trainer.view.show import show as print_run

    with told():
        print_run(Rollouts(run), Console(), rollout=rollout, decode=_decode(run) if rollout is not None else None)


@app.command()
def why(
    run: Run,
    rollout: Annotated[int, typer.Argument(help="The rollout's number, as `show` counts.")],
    token: Annotated[int, typer.Argument(help="The token's place in it, from 0.")],
) -> None:
    """Say who wrote a token, in which turn, under which policy version, and why it is (not) trained."""
    from trainer.run.file import Rollouts
    from trainer.view.why import why as ask

    with told():
        sys.stdout.write(f"{ask(Rollouts(run), rollout, token, _decode(run))}\n")


@app.command()
def replay(run: Run) -> None:
    """Play a recorded run again from its tape, without engine, network or key, and compare every id."""
    import anyio
    from rich.console import Console

    from trainer.replay import replay as again

    with told():
        same = anyio.run(again, run, Console())
    if not same:
        raise typer.Exit(1)


def _settings(file: Path | None, given: dict[str, Any]) -> RolloutSettings:
    """The file's settings, under those of the command line."""
    from pydantic import ValidationError

    from gateway.config.env import Expansion
    from gateway.config.mistakes import mistakes
    from gateway.config.read import read
    from gateway.errors import ConfigErrors
    from trainer.config import RolloutSettings

    written = (read(file) if file else None) or {}
    try:
        return RolloutSettings.model_validate({**written, **given})
    except ValidationError as error:
        where = file or Path("the options")
        raise ConfigErrors(
            mistakes(error, {**written, **given}, where, Expansion({}, where), RolloutSettings)
        ) from error


def _decode(run: Path) -> Any:
    """The run's own tokenizer, where it is still there."""
    from trainer.roll import settings_of
    from trainer.stage import template_of
    from trainer.template import TemplateError

    try:
        settings = settings_of(run)
        return template_of(settings.model, settings.template).tokens.decode
    except (GatewayError, TemplateError) as error:
        sys.stderr.write(f"mtrl-train: shown without text: {error}\n")
        return None


@contextmanager
def told() -> Iterator[None]:
    """An operator's mistake ends in its message; anything else is ours, and keeps its traceback."""
    try:
        yield
    except KeyboardInterrupt:
        sys.stderr.write("\nmtrl-train: stopped; what was over is saved\n")
        raise typer.Exit(130) from None
    except Exception as error:
        found = innermost(error)
        if not isinstance(found, _mistakes()):
            raise
        sys.stderr.write(f"mtrl-train: {found}\n")
        raise typer.Exit(2) from None


def _mistakes() -> tuple[type[BaseException], ...]:
    from trainer.engine.base import EngineError
    from trainer.run.file import RunError
    from trainer.template.errors import TemplateError

    known = sys.modules.get("trainer.model")
    return (GatewayError, EngineError, RunError, TemplateError, IndexError, *([known.ModelError] if known else []))


@app.callback()
def _logging(
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log to standard error what happens.")] = False,
) -> None:
    level = logging.INFO if verbose else logging.WARNING
    logging.basicConfig(level=level, format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr)


def main() -> None:
    leaving(app)


if __name__ == "__main__":
    main()
