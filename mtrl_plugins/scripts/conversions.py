"""Conversions of values that verl, ms-swift and TRL have in common: files, trackers, clips, betas and schedules."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mtrl_plugins.scripts.key_table import SourceConfig, UnsupportedValue, parse_number
from trainer.data.dataset import RowSource, open_rows

UNLIMITED = 1_000_000
"""Stands for no limit; the engine's context still applies."""
REPORTERS = ("wandb", "mlflow", "trackio")
BUILTIN_REPORTERS = ("console", "tensorboard", "file")
OTHER_REPORTERS = ("swanlab", "clearml", "vemlp_wandb", "comet_ml", "neptune", "aim", "dvclive")
"""Trackers that mtrl does not write to; no result depends on them."""
AGGREGATES = {"grpo": "sequence", "bnpo": "token", "dapo": "token", "cispo": "token", "dr_grpo": "constant"}
"""Aggregations of the loss types of ms-swift and TRL."""
DEVIATION_EPSILON = 1e-4
"""What ms-swift and TRL add to the standard deviation of rewards."""
LR_SCHEDULES = {"linear": "linear", "cosine": "cosine"}


def model_path(value: Any, config: SourceConfig) -> str:
    """The model's path with `~` expanded; names of other kinds are passed on."""
    if not isinstance(value, str) or not value:
        raise UnsupportedValue("is missing", "write the path of a model folder")
    return str(Path(value).expanduser()) if value.startswith("~") else value


def file_list(value: Any, config: SourceConfig) -> str | None:
    """Paths, joined by commas."""
    if value in (None, [], ""):
        return None
    paths = value if isinstance(value, list) else [value]
    if invalid := [item for item in paths if not isinstance(item, str)]:
        raise UnsupportedValue(f"{invalid[0]!r} is not a path", "write the path of a file")
    return ", ".join(model_path(item, config) for item in paths)


def load_rows(value: Any, config: SourceConfig) -> RowSource | None:
    """The rows if their files are on this machine, else None: translating downloads nothing."""
    try:
        paths = file_list(value, config)
    except UnsupportedValue:  # Reported for the key itself.
        return None
    is_local = paths is not None and all(Path(file).exists() for file in paths.split(", "))
    return open_rows(paths, "train") if paths is not None and is_local else None


def as_list(value: Any) -> list[Any]:
    """The values of a key that may have none, one or several."""
    return [] if value in (None, "") else list(value) if isinstance(value, list) else [value]


def report(value: Any, config: SourceConfig) -> list[str] | None:
    """The trackers besides metrics.jsonl and TensorBoard; unknown names are rejected."""
    names = [str(name) for name in as_list(value or None)]
    if unknown := [name for name in names if name not in (*REPORTERS, *BUILTIN_REPORTERS, *OTHER_REPORTERS, "none")]:
        known = ", ".join((*REPORTERS, *BUILTIN_REPORTERS))
        raise UnsupportedValue(f"unknown tracker {unknown[0]!r}", f"write some of {known}")
    return [name for name in names if name in REPORTERS] or None


def clip_low(value: Any, config: SourceConfig) -> float:
    """The lower clip bound of ms-swift and TRL."""
    return 1.0 if config["loss_type"] == "cispo" else parse_number(value)


def clip_high(value: Any, config: SourceConfig) -> float:
    """The upper clip bound of ms-swift and TRL."""
    bound = config.number("epsilon") if value is None else parse_number(value)
    if config["loss_type"] != "cispo":
        return bound
    if bound < 1:
        problem = f"cispo caps weights at {bound:g}, which is below 1, the weight of unchanged tokens"
        remedy = "set epsilon_high to 5, or another bound of at least 1"
        raise UnsupportedValue(problem, remedy, "loss_type" if value is None else "")
    return round(bound - 1, 9)


def betas(value: Any, config: SourceConfig) -> list[float]:
    """The betas of Adam in ms-swift and TRL."""
    return [parse_number(value), config.number("adam_beta2")]


def lr_decay(value: Any) -> str | None:
    """How the learning rate of ms-swift and TRL falls; None if it is constant."""
    if value in ("constant", "constant_with_warmup"):
        return None
    if value not in LR_SCHEDULES:
        raise UnsupportedValue(f"unknown schedule {value!r}", "write linear, cosine or constant")
    return LR_SCHEDULES[value]


def context_parallel(key: str, config: SourceConfig) -> int | None:
    """How many ranks share every row, by the value of a key; None if they do not."""
    return None if config[key] is None or config.count(key) == 1 else config.count(key)
