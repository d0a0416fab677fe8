"""The main command, which trains or resumes a run, and the command `eval`."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from json import dumps
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

from gateway.errors import ConfigError
from gateway.version import print_version
from trainer.cli.errors import report_errors
from trainer.cli.options import (
    MODEL_PANEL,
    RUN_PANEL,
    TRAIN_OPTIONS,
    TRAIN_PANEL,
    OverrideWords,
    TrainOption,
    TrainOptions,
    app,
    find_jobs,
)
from trainer.cli.rank_command import (
    follow_and_exit,
    has_run_to_resume,
    is_other_rank,
    keep_exit_code,
    restarts_ranks,
    train_with_restarts,
)
from trainer.distributed.restart_ranks import end_with_parent

if TYPE_CHECKING:
    from rich.console import Console

    from trainer.train.settings import TrainSettings


def model_option(text: str, metavar: str, *names: str) -> Any:
    """An option in the help's panel about model, data and tools."""
    return typer.Option(*names, metavar=metavar, help=text, rich_help_panel=MODEL_PANEL)


def run_option(text: str, metavar: str, least: int | None = None) -> Any:
    """An option in the help's panel about the run."""
    return typer.Option(metavar=metavar, help=text, min=least, rich_help_panel=TRAIN_PANEL)


def run_flag(name: str, text: str, *short: str) -> Any:
    """A flag in the help's panel about the run."""
    return typer.Option(name, *short, help=text, rich_help_panel=TRAIN_PANEL)


VERSION_OPTION: Any = typer.Option(
    "--version", callback=print_version, is_eager=True, help="Show the release, and exit"
)


class StderrHandler(logging.StreamHandler[TextIO]):
    """Logs to the current `sys.stderr`, which rich replaces while it shows a panel, to print above the panel."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


def train(  # Becomes the main command in `trainer.cli`, with the options of plug-ins.
    context: typer.Context,
    tools: Annotated[str | None, model_option("Tools. Default: tool_configs, or the demo's", "DIR|URL")] = None,
    mcp: Annotated[Path | None, model_option("MCP servers. Default: mcp_servers.json beside --tools", "FILE")] = None,
    model: Annotated[
        str | None, model_option("A folder, or org/name of the hub. Default: a tiny model", "PATH")
    ] = None,
    data: Annotated[str | None, model_option("Tasks: JSONL, parquet, or a dataset. Default: a demo", "FILE")] = None,
    environment: Annotated[str | None, model_option("gymnasium:NAME, textarena:NAME, openenv:URL ...", "NAME")] = None,
    config: Annotated[str | None, model_option("YAML with all settings, or the name of a job", "FILE|JOB")] = None,
    engine: Annotated[str | None, run_option("Inference engine. Default: auto", "auto|torch|sglang|URL")] = None,
    mode: Annotated[str | None, run_option("How far rollouts run ahead. Default: synchronous", "MODE")] = None,
    steps: Annotated[int | None, run_option("Number of training steps", "N")] = None,
    seed: Annotated[int | None, run_option("The same seed gives the same run", "N")] = None,
    ranks: Annotated[int | None, run_option("Processes that train together. Default: 1, or Ray's GPUs", "N", 1)] = None,
    restarts: Annotated[int | None, run_option("Restarts of --ranks after one is lost. Default: 3", "N", 0)] = None,
    out: Annotated[str | None, run_option("The run's folder. Default: the next one in runs/", "DIR")] = None,
    resume: Annotated[bool, run_flag("--resume", "Resume the run in --out, or the newest run")] = False,
    auto_resume: Annotated[bool, run_flag("--auto-resume", "Resume the run in --out, if there is one")] = False,
    dry_run: Annotated[bool, run_flag("--dry-run", "Check and show everything without training")] = False,
    verbose: Annotated[bool, run_flag("--verbose", "Log more to standard error", "-v")] = False,
    version: Annotated[bool, VERSION_OPTION] = False,
    **others: Any,
) -> None:
    """Train language models to use tools with multi-turn reinforcement learning, exact to the token.

    mtrl-train init my_job                           write a job to start from

    mtrl-train --tools DIR --model PATH --data FILE  your tools, model and tasks

    mtrl-train --config run.yaml --dry-run           check without training

    mtrl-train --config run.yaml update.lr=1e-4      one setting of the file changed
    """
    logging.basicConfig(
        level=logging.INFO if verbose else logging.WARNING,
        format="%(levelname)s %(name)s: %(message)s",
        handlers=[StderrHandler()],
    )
    options: dict[str, Any] = {
        "tools": tools, "mcp": mcp, "model": model, "data": data, "engine": engine,
        "mode": mode, "out": out, "steps": steps, "seed": seed, "environment": environment,
    }  # fmt: skip
    plugin_options = [option for option in TRAIN_OPTIONS.values() if others[option.parameter.name] not in (None, False)]
    if context.invoked_subcommand is not None:
        given = (config, ranks, restarts, *options.values())
        if resume or auto_resume or dry_run or plugin_options or context.obj or any(x is not None for x in given):
            raise typer.BadParameter(f"write the options of {context.invoked_subcommand!r} after its name")
        return
    with keep_exit_code(), report_errors():
        resume = resume or (auto_resume and has_run_to_resume(out))
        launch = next((option.launch for option in plugin_options if option.launch), None)
        given_plugins = {option.name: others[option.parameter.name] for option in plugin_options}
        changes = {"ranks": ranks if launch is None else None, "restarts": restarts}
        load = partial(_load_settings, options, config, given_plugins, context.obj or [], changes, resume=resume)
        if launch is not None and not dry_run:
            launch(*load(), TrainOptions(options | {"config": config}, ranks, resume, given_plugins))
            return
        company = [option for option in plugin_options if option.accompany]
        with prepare_run(load, company, dry_run=dry_run, resume=resume, verbose=verbose) as run:
            if run is not None:
                run()


@contextmanager
def prepare_run(
    load: Callable[[], tuple[TrainSettings, str]],
    company: Sequence[TrainOption] = (),
    *,
    dry_run: bool,
    resume: bool = False,
    verbose: bool = False,
) -> Iterator[Callable[[], None] | None]:
    """What trains the job whose settings and name are loaded, as the leader or as another rank; None if it was only to
    be checked. Afterwards, prints the next commands."""

    def load_with_model() -> tuple[TrainSettings, str]:
        from trainer.cli.run_file import fetch_model

        settings, name = load()
        return fetch_model(settings), name

    if is_other_rank() and not dry_run:
        follow_and_exit(load_with_model)
    settings, name = load_with_model()
    # Errors in settings are reported before torch is imported, which is slow.
    import anyio
    from rich.console import Console

    console = Console()
    if dry_run:
        from trainer.train.dry_run import dry_run as check
        from trainer.train.run_folder import choose_run_folder

        folder = choose_run_folder(settings, name, resume=resume)
        if not anyio.run(partial(check, resume=resume, verbose=verbose), settings, folder, console):
            raise typer.Exit(1)
        yield None
        return
    if restarts_ranks(settings):
        words = [*(["--verbose"] if verbose else []), *(option.name for option in company)]
        train_with_restarts(settings, name, words, resume=resume)
    end_with_parent()
    from trainer.train.run_folder import choose_run_folder

    folder = choose_run_folder(settings, name, resume=resume)
    console.print(f"the run is {folder}", markup=False, highlight=False)
    with report_errors(stopped=partial(_describe_stop, folder)), ExitStack() as stack:
        for option in company:
            if option.accompany:
                stack.enter_context(option.accompany(folder.absolute()))
        from trainer.train.start import train as run_training

        yield partial(anyio.run, partial(run_training, settings, folder, console, resume=resume))
    _print_next_commands(folder, console)


def _describe_stop(folder: Path) -> str:
    """The message after Ctrl-C: how the run is resumed."""
    from trainer.storage.run_files import RUN_INFO_FILE

    has_started = (folder / RUN_INFO_FILE).exists()
    return f"resume with: mtrl-train --resume --out {quote(str(folder))}" if has_started else "training had not started"


def _load_settings(
    options: dict[str, Any],
    config: str | None,
    others: Mapping[str, Any],
    words: list[str],
    changes: dict[str, int | None],
    *,
    resume: bool,
) -> tuple[TrainSettings, str]:
    """The run's settings and name, from a run file, or what a plug-in's option reads; `changes` are those of ranks."""
    from trainer.cli.run_file import load_settings
    from trainer.train.settings import TrainSettings

    named = [name for name in others if TRAIN_OPTIONS[name].read]
    if len(named) + (config is not None or resume) > 1:
        problem = "cannot be combined with --config, --resume or the other one"
        raise ConfigError(problem, field=named[0], remedy="write one of them")
    if named and (read := TRAIN_OPTIONS[named[0]].read):
        values, name = read(others[named[0]], words)
        typed = {name: value for name, value in options.items() if value is not None}
        settings = load_settings(TrainSettings, None, values | typed)
    else:
        settings, name = _load_run_settings(options, config, words, resume=resume)
    distributed = settings.distributed.model_copy(update={name: n for name, n in changes.items() if n is not None})
    return settings.model_copy(update={"distributed": distributed}), name


def _print_next_commands(folder: Path, console: Console) -> None:
    """Prints where the model is, and commands that show the run."""
    from trainer.model import SHARDS_FOLDER
    from trainer.train.checkpoint import BestCheckpoint, Checkpoints
    from trainer.train.run_folder import load_run_settings

    checkpoint, run = Checkpoints(folder).find_latest(), quote(str(folder))
    if checkpoint is None:
        return
    commands = {
        f"view {run}": "web UI with curves, rollouts and tokens",
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


def _load_run_settings(
    options: dict[str, Any], config: str | None, words: list[str], *, resume: bool
) -> tuple[TrainSettings, str]:
    """The run's settings and name. A resumed run has the settings that it started with."""
    from trainer.cli.run_file import find_run_file, load_settings
    from trainer.train.settings import DEFAULT_JOB, TrainSettings

    if resume and config is None:
        from trainer.train.run_folder import load_run_settings, newest_run

        saved = load_run_settings(Path(options["out"] or newest_run())).model_dump()
        typed = {name: value for name, value in options.items() if value is not None}
        return load_settings(TrainSettings, None, saved | typed, overrides=words), ""
    if config is None and all(options[name] is None for name in ("model", "data", "environment")):
        config = DEFAULT_JOB
    file = find_run_file(config) if config is not None else None
    name = file.stem if file else Path(options["model"] or options["data"] or "run").stem
    return _use_demo_tools(load_settings(TrainSettings, file, options, overrides=words)), name


def _use_demo_tools(settings: TrainSettings) -> TrainSettings:
    """The settings; a demo without tools, in a folder without `tool_configs`, has those that come with the package."""
    from trainer.train.settings import DEMO

    missing = "tools" not in settings.model_fields_set and not Path(str(settings.tools)).exists()
    return settings.model_copy(update={"tools": DEMO}) if missing and settings.data == DEMO else settings


EVALUATED = (
    "concurrency", "engine", "engine_dtype", "evaluation", "limits", "mcp", "result_limit", "reward", "sampling",
    "seed", "serving", "stepper", "stepper_args", "system", "template", "tools",
)  # fmt: skip
"""Settings that an evaluation of a run reads, besides its model and columns."""


@app.command("eval", rich_help_panel=RUN_PANEL)
def evaluate(
    run: Annotated[Path, typer.Argument(metavar="RUN|FILE", help="A run's folder, or a run file: its model alone.")],
    overrides: OverrideWords = None,
    rows: Annotated[int | None, typer.Option(min=1, help="Number of tasks. Default: the run's setting")] = None,
    data: Annotated[str | None, typer.Option(metavar="FILE", help="Other tasks than the run's.")] = None,
    k: Annotated[int | None, typer.Option("--k", min=1, help="Sampled tries of each task: pass@k and pass^k.")] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="For a run file. Default: the next runs/NAME-eval")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Compare success before and after training, sampled and greedy, by kind of task, with 95 % intervals.

    mtrl-train eval runs/NAME limits.rollout_tokens=8192 sampling.temperature=0.7   under other settings than the run's

    mtrl-train eval run.yaml model=org/name                                         a model that was not trained here
    """
    import anyio
    from rich.console import Console

    from trainer.cli.run_file import fetch_model, find_run_file, load_settings
    from trainer.train.evaluate import compare_run, evaluate_model
    from trainer.train.run_folder import load_run_settings, next_free_folder
    from trainer.train.settings import TrainSettings

    async def main() -> None:
        words = [*(overrides or []), *([] if k is None else [f"evaluation.k={k}"])]
        console = Console(stderr=True)
        if is_alone:
            loaded = load_settings(TrainSettings, find_run_file(run), {}, overrides=words)
            settings = _use_demo_tools(fetch_model(loaded))
            folder = out or next_free_folder(f"{run.stem}-eval")
            comparison = await evaluate_model(settings, rows, data, console, folder)
            console.print(f"saved in {folder}; read it with: mtrl-train show {folder}/eval/greedy", soft_wrap=True)
        else:
            changed = None
            for word in words:
                if (section := word.partition("=")[0].partition(".")[0]) not in EVALUATED:
                    remedy = f"set one of {', '.join(EVALUATED)}"
                    raise ConfigError(f"an evaluation does not read `{section}`", field=word, remedy=remedy)
            if words:
                saved = load_run_settings(run).model_dump()
                changed = load_settings(TrainSettings, None, saved, overrides=words), words
            comparison = await compare_run(run, rows, data, console, changed=changed)
        if json:
            sys.stdout.write(dumps(comparison.summary) + "\n")
        else:
            Console().print(comparison.table)

    is_alone = not run.is_dir() and (run.suffix in (".yaml", ".yml") or str(run) in find_jobs())
    if out is not None and not is_alone:
        raise typer.BadParameter("is for a run file: the evaluation of a run is in its folder", param_hint="--out")
    with report_errors():
        anyio.run(main)
