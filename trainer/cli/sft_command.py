"""The command `sft`: supervised fine-tuning on traces, by the training loop."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, inf
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gateway.errors import ConfigError
from trainer.cli.errors import report_errors
from trainer.cli.options import OverrideWords, app
from trainer.cli.rank_command import keep_exit_code
from trainer.cli.train_command import prepare_run

if TYPE_CHECKING:
    from trainer.train.settings import TrainSettings

BATCH = 32
"""Traces of a step, unless the run file has `prompts`."""
OF_THE_RUN = (
    "model",
    "trust_remote_code",
    "tools",
    "mcp",
    "template",
    "limits",
    "result_limit",
    "columns",
    "environment",
)
"""Settings that are those of the run whose rollouts are learned, unless others are given."""


@app.command()
def sft(
    overrides: OverrideWords = None,
    data: Annotated[
        str | None, typer.Option(metavar="FILE", help="Traces: JSONL, parquet, or a dataset of the hub.")
    ] = None,
    from_run: Annotated[
        Path | None, typer.Option("--from", metavar="RUN", help="A run, whose rollouts are the traces.")
    ] = None,
    where: Annotated[
        str | None, typer.Option(metavar="CONDITION", help='Which rollouts, such as "reward >= 1 and calls > 0".')
    ] = None,
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="Another system prompt for each trace.")] = None,
    drop_examples: Annotated[
        bool, typer.Option("--drop-examples", help="Leave out the examples before each rollout's question.")
    ] = False,
    model: Annotated[str | None, typer.Option(metavar="PATH", help="A model's folder. Default: that of --from")] = None,
    tools: Annotated[str | None, typer.Option(metavar="DIR|URL", help="Tools of traces that bring none.")] = None,
    epochs: Annotated[float, typer.Option(help="Passes over the traces.")] = 1.0,
    steps: Annotated[int | None, typer.Option(min=1, help="Training steps, instead of epochs.")] = None,
    batch: Annotated[int | None, typer.Option(min=1, help=f"Traces a step. Default: {BATCH}")] = None,
    lr: Annotated[float | None, typer.Option(help="Learning rate. Default: by the model's size")] = None,
    seed: Annotated[int | None, typer.Option(help="The order of the traces.")] = None,
    ranks: Annotated[int | None, typer.Option(metavar="N", min=1, help="Processes that train together.")] = None,
    out: Annotated[str | None, typer.Option(metavar="DIR", help="The run's folder.")] = None,
    config: Annotated[str | None, typer.Option(metavar="FILE", help="A run file with all other settings.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check every trace without training.")] = False,
) -> None:
    """Learn the assistant's turns of traces: other people's, or a run's own successes.

    mtrl-train sft --data traces.jsonl --model PATH                     messages, prompt and completion, or ShareGPT

    mtrl-train sft --from runs/NAME --where "reward >= 1"               rejection sampling

    mtrl-train sft --from runs/NAME --where "reward >= 1" --drop-examples --system "Use the tools."

    Every trace is checked before the first step: what is trained is read back by the parser of tool calls. The run is
    resumed, shown, evaluated and exported as any other.
    """
    if not 0 < epochs < inf:
        raise typer.BadParameter(f"is a finite number above 0, not {epochs:g}", param_hint="--epochs")
    given = {"model": model, "tools": tools, "seed": seed, "out": out, "prompts": batch}
    traces = {"where": where, "system": system, "drop_examples": drop_examples or None}

    def load() -> tuple[TrainSettings, str]:
        source = data if from_run is None else str(from_run)
        if (data is None) == (from_run is None) and not (config and source is None):
            raise ConfigError("name either --data or --from", remedy="mtrl-train sft --data FILE --model PATH")
        values = _run_values(from_run) if from_run is not None else {}
        return _load(config, values, given | {"data": source}, traces, (epochs, steps, lr, ranks), overrides or ())

    with keep_exit_code(), report_errors(), prepare_run(load, dry_run=dry_run) as run:
        if run is not None:
            run()


def _run_values(run: Path) -> dict[str, Any]:
    """The settings of a run, of training or of rollouts alone, that its traces need."""
    from trainer.storage.rollout_file import ROLLOUTS_FILE
    from trainer.storage.run_files import read_run_info, require_run

    require_run(run)
    if not (run / ROLLOUTS_FILE).is_file():
        remedy = "name a run whose first rollout has ended, or name other traces with --data"
        raise ConfigError("the run has no rollouts", file=run, remedy=remedy)
    saved = read_run_info(run).get("settings") or {}
    return {name: saved[name] for name in OF_THE_RUN if saved.get(name) is not None}


def _load(
    config: str | None,
    values: dict[str, Any],
    given: dict[str, Any],
    traces: dict[str, Any],
    numbers: tuple[float, int | None, float | None, int | None],
    words: Sequence[str],
) -> tuple[TrainSettings, str]:
    """The settings, whose steps are counted by the number of traces, and the run's name."""
    from trainer.cli.run_file import find_run_file, load_settings, read_run_file
    from trainer.data.traces import TraceOptions, load_traces
    from trainer.train.settings import TrainSettings

    epochs, steps, lr, ranks = numbers
    file = find_run_file(config) if config is not None else None
    content = read_run_file(file)
    named = {*content, *(name for name, value in given.items() if value is not None)}
    named |= {word.partition("=")[0] for word in words}
    if not named.isdisjoint(("tools", "stepper")):
        values = {name: value for name, value in values.items() if name != "environment"}  # It has its own.
    options: dict[str, Any] = {name: value for name, value in values.items() if name not in content}
    options |= {name: value for name, value in given.items() if value is not None}
    options["sft"] = (content.get("sft") or {}) | {name: value for name, value in traces.items() if value is not None}
    options.setdefault("prompts", content.get("prompts", BATCH))
    if lr is not None:
        options["update"] = (content.get("update") or {}) | {"lr": lr}
    if ranks is not None:
        options["distributed"] = (content.get("distributed") or {}) | {"ranks": ranks}
    if steps is not None:
        options["steps"] = steps
    settings = load_settings(TrainSettings, file, options, overrides=words)
    if "steps" not in {*options, *named} and settings.sft is not None:
        count = len(load_traces(settings, settings.data, TraceOptions(**settings.sft.model_dump())))
        settings = settings.model_copy(update={"steps": max(1, ceil(count * epochs / settings.prompts))})
    return settings, "sft"
