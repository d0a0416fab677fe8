"""Exports a checkpoint: finds and checks it, and writes its model, tokenizer and chat template into a new folder."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from gateway.disk_errors import describe_write_error
from gateway.errors import ConfigError, OperatorError
from trainer.policy.export_model import has_adapters, write_adapters, write_model
from trainer.storage.rollout_file import RunError
from trainer.storage.run_files import RUN_INFO_FILE, read_run_info
from trainer.train.checkpoint import (
    BEST_FILE,
    CHECKPOINTS_FOLDER,
    METRIC,
    STATE_FILE,
    BestCheckpoint,
    Checkpoint,
    Checkpoints,
    load_checkpoint,
)
from trainer.train.job import copy_tokenizer_files
from trainer.train.model_card import write_card
from trainer.weight_files import share_weight_files


@dataclass(frozen=True, slots=True)
class Exported:
    """What was written."""

    step: int
    dtype: str
    kind: str
    best: BestCheckpoint
    """The run's best step; 0 if none is known."""


def read_best(run: Path) -> BestCheckpoint:
    """The best step of a run that has ended or is under way; its value is below 0 if none is known."""
    return BestCheckpoint(run, sys.maxsize)


def export_checkpoint(
    source: Path,
    out: Path,
    *,
    adapter: bool = False,
    best: bool = False,
    model: Path | None = None,
    warn: Callable[[str], None] = lambda _: None,
) -> Exported:
    """Writes a Hugging Face folder from a checkpoint, or the latest or best of a run. The folder is complete or absent.

    `model` is the folder that training started from; by default the one that the run remembers.
    """
    if out.exists():
        raise ConfigError("the folder exists already", file=out, remedy="name another one with --out, or remove it")
    checkpoint = find_best(source) if best else find_checkpoint(source, warn)
    if adapter and not has_adapters(checkpoint.folder):
        problem = "the whole model was trained, so there are no adapters"
        raise ConfigError(problem, file=checkpoint.folder, remedy="leave --adapter out")
    start = _find_start(checkpoint.folder, model)
    temporary = out.with_name(f".{out.name}.writing")
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        dtype = (write_adapters if adapter else write_model)(checkpoint.folder, start, temporary)
        share_weight_files(temporary)
        copy_tokenizer_files(checkpoint.folder, temporary)
        run = checkpoint.folder.absolute().parent.parent
        write_card(temporary, out.name, run, checkpoint.step, is_adapter=adapter)
        temporary.rename(out)
    except OperatorError:
        raise
    except Exception as error:  # boundary: each file format reports a full disk in its own way
        raise RunError(describe_write_error(out, error, "then export again")) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    merged = "the model, with the adapters merged" if has_adapters(checkpoint.folder) else "the model"
    kind = "the adapters" if adapter else merged
    return Exported(checkpoint.step, str(dtype).removeprefix("torch."), kind, read_best(source))


def find_best(run: Path) -> Checkpoint:
    """The verified checkpoint of the step with the highest `eval/greedy` of a run."""
    found = read_best(run)
    if found.value < 0:
        problem = f"no best step is known: there is no {BEST_FILE} that can be read"
        remedy = "name a run that was evaluated (`evaluation.every`), or leave --best out for its latest checkpoint"
        raise ConfigError(problem, file=run, field="--best", remedy=remedy)
    if not found.step:
        problem = f"no step was better than the model before training, with `{METRIC}` {found.value:.3f}"
        remedy = "leave --best out for the latest checkpoint"
        raise ConfigError(problem, file=run, field="--best", remedy=remedy)
    return load_checkpoint(run / CHECKPOINTS_FOLDER / f"{found.step:06}")


def find_checkpoint(source: Path, warn: Callable[[str], None] = lambda _: None) -> Checkpoint:
    """A verified checkpoint, given its folder or that of its run."""
    if not source.is_dir():
        raise ConfigError("there is no such folder", file=source, remedy="name a run, or one of its checkpoints")
    if (source / STATE_FILE).is_file():
        return load_checkpoint(source)
    if (source / CHECKPOINTS_FOLDER).is_dir() or (source / RUN_INFO_FILE).is_file():
        found = Checkpoints(source).find_latest(warn)
        if found is None:
            raise ConfigError("the run has no checkpoint yet", file=source, remedy="continue the run with --resume")
        return found
    problem = f"is neither a run nor a whole checkpoint: it has no {STATE_FILE}, which is written last"
    raise ConfigError(problem, file=source, remedy="name a run, whose latest whole checkpoint is then taken")


def _find_start(checkpoint: Path, model: Path | None) -> Path | None:
    """The model that training started from; None if nobody knows where it is."""
    if model is not None:
        if not (model / "config.json").is_file():
            raise ConfigError(
                "there is no config.json here", file=model, field="--model", remedy="name a model's folder"
            )
        return model
    known = Path(str(read_run_info(checkpoint.absolute().parent.parent).get("model", "")))
    return known if (known / "config.json").is_file() else None
