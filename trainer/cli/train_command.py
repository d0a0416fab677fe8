"""The main command, which trains or resumes a run, and the command `eval`."""

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
from gateway.version import print_version
from trainer.cli.errors import report_errors
from trainer.cli.options import RUN_PANEL, SWIFT_OPTION, VERL_OPTION, RunFolder, app
from trainer.cli.rank import follow_and_exit, is_other_rank, keep_exit_code
from trainer.cli.ray_job import check_ray_options, run_settings_on_ray
from trainer.cli.read_commands import serve_while_training
from trainer.cli.restart import has_run_to_resume, restarts_ranks, train_with_restarts
from trainer.distributed.restart_ranks import end_with_parent

if TYPE_CHECKING:
    from rich.console import Console

    from trainer.train.settings import TrainSettings


def model_option(text: str, metavar: str, *names: str) -> Any:
    """An option in the help's panel about model, data and tools."""
    return typer.Option(*names, metavar=metavar, help=text, rich_help_panel="Model, data and tools")


def run_option(text: str, metavar: str, least: int | None = None) -> Any:
    """An option in the help's panel about the run."""
    return typer.Option(metavar=metavar, help=text, min=least, rich_help_panel="Run")


def run_flag(name: str, text: str, *short: str) -> Any:
    """A flag in the help's panel about the run."""
    return typer.Option(name, *short, help=text, rich_help_panel="Run")


VERSION_OPTION: Any = typer.Option(
    "--version", callback=print_version, is_eager=True, help="Show the release, and exit"
)


class StderrHandler(logging.StreamHandler[TextIO]):
    """Logs to the current `sys.stderr`, which rich replaces while it shows a panel, to print above the panel."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


Swift = Annotated[
    str | None, model_option("A script for ms-swift, or its command in quotes", "FILE|COMMAND", SWIFT_OPTION)
]


def _log_to_stderr(level: int) -> None:
    logging.basicConfig(level=level, format="%(levelname)s %(name)s: %(message)s", handlers=[StderrHandler()])


@app.callback(invoke_without_command=True)
def train(
    context: typer.Context,
    tools: Annotated[str | None, model_option("Tools. Default: tool_configs, or the demo's", "DIR|URL")] = None,
    mcp: Annotated[Path | None, model_option("MCP servers. Default: mcp_servers.json beside --tools", "FILE")] = None,
    model: Annotated[str | None, model_option("A Hugging Face model's folder. Default: a tiny model", "PATH")] = None,
    data: Annotated[str | None, model_option("Tasks: JSONL, parquet, or a dataset. Default: a demo", "FILE")] = None,
    environment: Annotated[str | None, model_option("gymnasium:NAME, textarena:NAME, openenv:URL ...", "NAME")] = None,
    config: Annotated[str | None, model_option("YAML with all settings, or the name of a job", "FILE|JOB")] = None,
    verl: Annotated[Path | None, model_option("YAML or a script for verl", "FILE [KEY=VALUE]...", VERL_OPTION)] = None,
    swift: Swift = None,
    engine: Annotated[str | None, run_option("Inference engine. Default: auto", "auto|torch|sglang|URL")] = None,
    mode: Annotated[str | None, run_option("How far rollouts run ahead. Default: synchronous", "MODE")] = None,
    steps: Annotated[int | None, run_option("Number of training steps", "N")] = None,
    seed: Annotated[int | None, run_option("The same seed gives the same run", "N")] = None,
    ranks: Annotated[int | None, run_option("Processes that train together. Default: 1, or Ray's GPUs", "N", 1)] = None,
    restarts: Annotated[int | None, run_option("Restarts of --ranks after one is lost. Default: 3", "N", 0)] = None,
    ray: Annotated[str | None, run_option("Run on this Ray cluster", "ADDRESS")] = None,
    ray_servers: Annotated[int | None, run_option("SGLang servers there. Default: serving.replicas", "N")] = None,
    out: Annotated[str | None, run_option("The run's folder. Default: the next one in runs/", "DIR")] = None,
    resume: Annotated[bool, run_flag("--resume", "Resume the run in --out, or the newest run")] = False,
    auto_resume: Annotated[bool, run_flag("--auto-resume", "Resume the run in --out, if there is one")] = False,
    view: Annotated[bool, run_flag("--view", "Serve the web UI while the run trains")] = False,
    dry_run: Annotated[bool, run_flag("--dry-run", "Check and show everything without training")] = False,
    verbose: Annotated[bool, run_flag("--verbose", "Log more to standard error", "-v")] = False,
    version: Annotated[bool, VERSION_OPTION] = False,
) -> None:
    """Train language models to use tools with multi-turn reinforcement learning, exact to the token.

    mtrl-train init my_job                           write a job to start from

    mtrl-train --tools DIR --model PATH --data FILE  your tools, model and tasks

    mtrl-train --config run.yaml --dry-run           check without training
    """
    _log_to_stderr(logging.INFO if verbose else logging.WARNING)
    options: dict[str, Any] = {
        "tools": tools, "mcp": mcp, "model": model, "data": data, "engine": engine,
        "mode": mode, "out": out, "steps": steps, "seed": seed, "environment": environment,
    }  # fmt: skip
    values = (config, verl, swift, ranks, restarts, ray, ray_servers, *options.values())
    is_set = (resume, auto_resume, dry_run, view, *(value is not None for value in values))
    if context.invoked_subcommand is not None:
        return _refuse_options(context.invoked_subcommand, has_options=any(is_set))
    sources = {"config": config, VERL_OPTION: verl, SWIFT_OPTION: swift}
    with keep_exit_code(), report_errors():
        check_ray_options(ray, ray_servers)
        resume = resume or (auto_resume and has_run_to_resume(out))
        changes = {"ranks": ranks if ray is None else None, "restarts": restarts}
        words = context.obj or []
        load = partial(_load_settings, options, sources, words, changes, resume=resume)
        if ray is not None and not dry_run:
            run_settings_on_ray(*load(), options | {"config": config}, (ray, ranks, ray_servers), resume=resume)
        elif is_other_rank() and not dry_run:
            follow_and_exit(load)
        else:
            _train_or_restart(load(), verbose=verbose, resume=resume, view=view, dry_run=dry_run)


def _refuse_options(subcommand: str, *, has_options: bool) -> None:
    """Refuses the training's options before the name of another command."""
    if has_options:
        raise typer.BadParameter(f"write the options of {subcommand!r} after its name")


def _train_or_restart(loaded: tuple[TrainSettings, str], *, verbose: bool, **flags: bool) -> None:
    """Trains in this process, or in a child that is started again after a rank is lost."""
    settings, name = loaded
    if not flags["dry_run"] and restarts_ranks(settings):
        given = {"--view": flags["view"], "--verbose": verbose}
        words = [word for word, is_set in given.items() if is_set]
        train_with_restarts(settings, name, words, resume=flags["resume"])
    end_with_parent()
    _train(settings, name, **flags)


def _load_settings(
    options: dict[str, Any],
    sources: dict[str, Any],
    words: list[str],
    changes: dict[str, int | None],
    *,
    resume: bool,
) -> tuple[TrainSettings, str]:
    """The run's settings and name, from a run file, or a file for verl or ms-swift; `changes` are those of ranks."""
    config, verl, swift = sources["config"], sources[VERL_OPTION], sources[SWIFT_OPTION]
    named = [name for name in (VERL_OPTION, SWIFT_OPTION) if sources[name] is not None]
    if len(named) + (config is not None or resume) > 1:
        problem = "cannot be combined with --config, --resume or the other one"
        raise ConfigError(problem, field=named[0], remedy="write one of them")
    if verl is not None:
        settings, name = _translate_settings(options, [str(verl), *words], verl.stem)
    elif swift is not None:
        stem = Path(swift).stem if Path(swift).is_file() else "swift"
        settings, name = _translate_settings(options, _split_command(swift), stem)
    else:
        settings, name = _load_run_settings(options, config, resume=resume)
    distributed = settings.distributed.model_copy(update={name: n for name, n in changes.items() if n is not None})
    return settings.model_copy(update={"distributed": distributed}), name


def _train(settings: TrainSettings, name: str, *, resume: bool, dry_run: bool, view: bool) -> None:
    """Trains, or checks for a dry run. Errors in settings are reported before torch is imported, which is slow."""
    import anyio
    from rich.console import Console

    from trainer.storage.run_files import RUN_INFO_FILE
    from trainer.train.run_folder import choose_run_folder

    console = Console()
    if dry_run:
        _dry_run(settings, console)
        return
    folder = choose_run_folder(settings, name, resume=resume)
    console.print(f"the run is {folder}", markup=False, highlight=False)

    def stopped() -> str:
        has_started = (folder / RUN_INFO_FILE).exists()
        resume_hint = f"resume with: mtrl-train --resume --out {quote(str(folder))}"
        return resume_hint if has_started else "training had not started"

    with report_errors(stopped=stopped), serve_while_training(folder.absolute()) if view else nullcontext():
        from trainer.train.start import train as run_training

        anyio.run(partial(run_training, settings, folder, console, resume=resume))
    _print_next_commands(folder, console)


def _dry_run(settings: TrainSettings, console: Console) -> None:
    """Checks what a run would start with."""
    import anyio

    from trainer.train.dry_run import dry_run

    if not anyio.run(dry_run, settings, console):
        raise typer.Exit(1)


def _print_next_commands(folder: Path, console: Console) -> None:
    """Prints where the model is, and commands that show the run."""
    from trainer.model import SHARDS_FOLDER
    from trainer.train.best_checkpoint import BestCheckpoint
    from trainer.train.checkpoint import Checkpoints
    from trainer.train.run_folder import load_run_settings

    checkpoint, run = Checkpoints(folder).find_latest(), quote(str(folder))
    if checkpoint is None:
        return
    commands = {
        f"view {run}": "web UI with curves, rollouts and tokens",
        f"plot {run}": "curves",
        f"eval {run}": "success before and after training, on held-out tasks",
        f"show {run}": "rollouts; with a number, one rollout token by token",
        f"export {run} --out FOLDER": "the model as a folder for transformers, SGLang and vLLM",
    }
    if load_run_settings(folder).record:
        commands[f"replay {run} {checkpoint.step}"] = "replay the last step from its tape"
    is_sharded = (checkpoint.folder / SHARDS_FOLDER).is_dir()
    place = "`export` writes the model" if is_sharded else f"the model is in {checkpoint.folder}"
    steps = "1 step is" if checkpoint.step == 1 else f"{checkpoint.step} steps are"
    text = f"{steps} finished; {place}"
    console.print(text, markup=False, soft_wrap=True)
    best = BestCheckpoint(folder, checkpoint.step)
    if best.step and best.step != checkpoint.step:
        text = f"the best by evaluation ({best.value:.0%}) is that of step {best.step}, which is kept as well"
        console.print(text, markup=False, soft_wrap=True)
    width = max(map(len, commands))
    for command, what in commands.items():
        console.print(f"  mtrl-train {command:{width}}  {what}", markup=False, soft_wrap=True, highlight=False)


def _load_run_settings(options: dict[str, Any], config: str | None, *, resume: bool) -> tuple[TrainSettings, str]:
    """The run's settings and name. A resumed run has the settings that it started with."""
    from trainer.cli.run_file import find_run_file, load_settings
    from trainer.train.run_folder import load_run_settings, newest_run
    from trainer.train.settings import DEFAULT_JOB, TrainSettings

    if resume and config is None:
        saved = load_run_settings(Path(options["out"] or newest_run())).model_dump()
        typed = {name: value for name, value in options.items() if value is not None}
        return load_settings(TrainSettings, None, saved | typed), ""
    if config is None and all(options[name] is None for name in ("model", "data", "environment")):
        config = DEFAULT_JOB
    file = find_run_file(config) if config is not None else None
    name = file.stem if file else Path(options["model"] or options["data"] or "run").stem
    return _use_demo_tools(load_settings(TrainSettings, file, options)), name


def _use_demo_tools(settings: TrainSettings) -> TrainSettings:
    """The settings; a demo without tools, in a folder without `tool_configs`, has those that come with the package."""
    from trainer.train.settings import DEMO

    missing = "tools" not in settings.model_fields_set and not Path(str(settings.tools)).exists()
    return settings.model_copy(update={"tools": DEMO}) if missing and settings.data == DEMO else settings


def _translate_settings(options: dict[str, Any], words: list[str], name: str) -> tuple[TrainSettings, str]:
    """Settings translated from verl or ms-swift, overridden by mtrl's own options."""
    from trainer.cli.run_file import load_settings
    from trainer.cli.translate_command import translate_to_settings
    from trainer.train.settings import TrainSettings

    typed = {name: value for name, value in options.items() if value is not None}
    return load_settings(TrainSettings, None, translate_to_settings(words) | typed), name


def _split_command(text: str) -> list[str]:
    """The path of a file, or the words of a shell command."""
    return [text] if Path(text).is_file() else split(text)


@app.command("eval", rich_help_panel=RUN_PANEL)
def evaluate(
    run: RunFolder,
    rows: Annotated[int | None, typer.Option(help="Number of tasks. Default: the run's setting")] = None,
    data: Annotated[str | None, typer.Option(metavar="FILE", help="Other tasks than the run's.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Compare success before and after training, sampled and greedy, by kind of task, with 95 % intervals."""
    import anyio
    from rich.console import Console

    from trainer.train.evaluate import compare_run

    async def main() -> None:
        comparison = await compare_run(run, rows, data, Console(stderr=True))
        if json:
            sys.stdout.write(comparison.json + "\n")
        else:
            Console().print(comparison.table)

    with report_errors():
        anyio.run(main)
