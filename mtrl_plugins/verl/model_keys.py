"""Converts verl's keys for the model, its data, the optimizer, the run and its rewards."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mtrl_plugins.verl import algorithm_keys
from mtrl_plugins.verl.key_rule import SourceConfig, UnsupportedValue, parse_count, parse_number
from mtrl_plugins.verl.rollout_keys import max_prompt_tokens, max_response_tokens
from trainer.data.dataset import RowSource, open_rows

MODEL = "actor_rollout_ref.model"
OPTIM = "actor_rollout_ref.actor.optim"
REPORTERS = ("wandb", "mlflow", "trackio")
BUILTIN_REPORTERS = ("console", "tensorboard", "file")
OTHER_REPORTERS = ("swanlab", "clearml", "vemlp_wandb", "comet_ml", "neptune", "aim", "dvclive")
"""Trackers that mtrl does not write to; no result depends on them."""
RECIPES = {"dapo": None, "transfer_queue": None, "one_step_off_policy": "one_step_off"}
"""verl's recipes that train as its own program does, and the mode that each is."""
KNOWN_SOURCE = "openai/gsm8k"
DROPOUT_OPTIONS = ("attention_dropout", "embd_pdrop", "resid_pdrop", "attn_pdrop", "hidden_dropout")
OFFLOAD_OPTIONS = (
    "optimizer_offload_fraction",
    "overlap_cpu_optimizer_d2h_h2d",
    "use_precision_aware_optimizer",
    "optimizer_cpu_offload",
)
"""Optimizer options that only choose where its state is kept."""
MAX_CHECKED_ROWS = 10_000
"""Rows whose `data_source` is checked when the configuration is translated."""


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


def train_files(value: Any, config: SourceConfig) -> str:
    """Paths of the training data, which have to be given."""
    paths = file_list(value, config)
    if paths is None:
        raise UnsupportedValue("is missing", "write the path of a file")
    return paths


def load_rows(value: Any, config: SourceConfig) -> RowSource | None:
    """The rows if their files are on this machine, else None: translating downloads nothing."""
    try:
        paths = file_list(value, config)
    except UnsupportedValue:  # Reported for the key itself.
        return None
    is_local = paths is not None and all(Path(file).exists() for file in paths.split(", "))
    return open_rows(paths, "train") if paths is not None and is_local else None


def evaluation_rows(value: Any, config: SourceConfig) -> dict[str, int] | None:
    """The same number of rows for each evaluation; all rows if their number is known."""
    if value is not None and parse_count(value) > 0:
        return {"rows": value, "few": value}
    rows = load_rows(config["data.val_files"], config)
    return None if rows is None else {"rows": len(rows), "few": len(rows)}


def evaluation_every(value: Any, config: SourceConfig) -> int:
    """The steps between evaluations; 0 for none."""
    return 0 if value is False else max(0, parse_count(value))


def steps(value: Any, config: SourceConfig) -> int:
    """The number of steps, computed from epochs and rows if it is not given."""
    if value is not None:
        return parse_count(value)
    epochs, batch = config.count("trainer.total_epochs"), config.count("data.train_batch_size")
    rows = load_rows(config["data.train_files"], config)
    if rows is None:
        problem = f"cannot compute the steps of {epochs} epochs: the data is not on this machine"
        raise UnsupportedValue(problem, "write `trainer.total_training_steps=N`", "trainer.total_training_steps")
    if len(rows) < batch:
        raise UnsupportedValue(
            f"{batch} prompts per step are more than the {len(rows)} rows",
            "write a smaller data.train_batch_size",
            "data.train_batch_size",
        )
    return epochs * (len(rows) // batch)


def warmup(value: Any, config: SourceConfig) -> int:
    """Warmup in optimizer updates; verl counts steps of the run."""
    if value is not None and parse_number(value) >= 0:
        return parse_count(value) * updates_per_step(config)
    ratio = config.number(f"{OPTIM}.lr_warmup_steps_ratio")
    return int(ratio * steps(config["trainer.total_training_steps"], config)) * updates_per_step(config) if ratio else 0


def updates_per_step(config: SourceConfig) -> int:
    """The number of optimizer updates in a step of the run."""
    return algorithm_keys.minibatches(None, config) * algorithm_keys.epochs(None, config)


def lr_schedule(value: Any, config: SourceConfig) -> dict[str, Any] | None:
    """The decay of the learning rate; None if it is constant."""
    if value == "constant":
        return None
    if value != "cosine":
        raise UnsupportedValue(f"unknown schedule {value!r}", "write constant or cosine")
    if (cycles := config.number(f"{OPTIM}.num_cycles")) != 0.5:
        raise UnsupportedValue(
            f"{cycles:g} cycles are not supported: the rate would rise again", "remove it", f"{OPTIM}.num_cycles"
        )
    total, key = (
        steps(config["trainer.total_training_steps"], config) * updates_per_step(config),
        f"{OPTIM}.min_lr_ratio",
    )
    return {"steps": total, "floor": config.number(key) if config[key] is not None else 0.0, "fall": "cosine"}


def microbatch_tokens(value: Any, config: SourceConfig) -> int | None:
    """The tokens of a micro-batch; verl may give a number of rows instead."""
    if value is not None:
        return parse_count(value)
    rows = config["actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu"]
    return None if rows is None else parse_count(rows) * (max_prompt_tokens(config) + max_response_tokens(config))


def check_optimizer_options(value: Any, config: SourceConfig) -> None:
    """Rejects optimizer options that change more than where the state is kept."""
    if unknown := [name for name in value if name not in OFFLOAD_OPTIONS]:
        raise UnsupportedValue(f"{unknown[0]!r} is not supported", "remove it")


def lora(value: Any, config: SourceConfig) -> dict[str, Any] | None:
    """The LoRA settings; None if all weights are trained."""
    if not value:
        return None
    targets = config[f"{MODEL}.target_modules"]
    settings: dict[str, Any] = {"rank": parse_count(value), "alpha": config.number(f"{MODEL}.lora_alpha")}
    if targets != "all-linear":
        settings["targets"] = [targets] if isinstance(targets, str) else targets
    return settings


def report(value: Any, config: SourceConfig) -> list[str] | None:
    """The trackers besides metrics.jsonl and TensorBoard."""
    return choose_reporters([value] if isinstance(value, str) else list(value or ()))


def choose_reporters(names: Sequence[str]) -> list[str] | None:
    """The trackers among the names that mtrl writes to; unknown names are rejected."""
    known = (*REPORTERS, *BUILTIN_REPORTERS, *OTHER_REPORTERS, "none")
    if unknown := [name for name in names if name not in known]:
        raise UnsupportedValue(
            f"unknown tracker {unknown[0]!r}", f"write some of {', '.join((*REPORTERS, *BUILTIN_REPORTERS))}"
        )
    return [name for name in names if name in REPORTERS] or None


def mode(value: Any, config: SourceConfig) -> str | None:
    """The mode of one of verl's recipes."""
    if value is not None and value not in RECIPES:
        raise UnsupportedValue(f"the recipe {value!r} is not supported", "use verl.trainer.main_ppo")
    return RECIPES.get(value)


def check_truncation(value: Any, config: SourceConfig) -> None:
    """Rejects the truncation of prompts, unless all that are too long are dropped before."""
    if value != "error" and config["data.filter_overlong_prompts"] is not True:
        remedy = "write `data.truncation=error`, or `data.filter_overlong_prompts=True`"
        raise UnsupportedValue("a truncated prompt is a different task", remedy)


def check_model_overrides(value: Any, config: SourceConfig) -> None:
    """Rejects changes of a model's configuration, except that there is no dropout."""
    changed = {name: item for name, item in value.items() if not (name in DROPOUT_OPTIONS and item == 0)}
    if changed:
        raise UnsupportedValue(f"{changed} is not supported", "write it into the configuration in the model's folder")


def check_lora_targets(value: Any, config: SourceConfig) -> None:
    """Rejects names of modules that only Megatron's models have."""
    names = [value] if isinstance(value, str) else list(value or ())
    if invalid := [name for name in names if str(name).startswith("linear_")]:
        remedy = "write names of the model's own modules, such as [q_proj,v_proj], or all-linear"
        raise UnsupportedValue(f"{invalid[0]!r} is a module of Megatron's models", remedy)


def reward(value: Any, config: SourceConfig) -> dict[str, Any]:
    """The user's reward function, or the one that verl chooses by `data_source`."""
    if value:
        file = str(Path(str(value)).expanduser())
        args: dict[str, Any] = {"path": file, "name": config["custom_reward_function.name"]}
        if kwargs := config["custom_reward_function.reward_kwargs.*"]:
            args["kwargs"] = kwargs
        return {"custom": {"function": "mtrl_plugins.verl.reward_function:custom", "args": args}}
    rows = load_rows(config["data.train_files"], config)
    for index in range(min(len(rows), MAX_CHECKED_ROWS) if rows is not None else 0):
        source = rows[index].get("data_source") if rows is not None else None
        if source != KNOWN_SOURCE:
            problem = f"the rows have the data source {source!r}, which mtrl has no reward function for"
            raise UnsupportedValue(problem, "name your own function: `custom_reward_function.path=rewards.py`")
    return {"score": {"function": "mtrl_plugins.verl.reward_function:by_source"}}


def check_reward_manager(value: Any, config: SourceConfig) -> None:
    """Rejects reward managers that do not score one answer at a time."""
    if value not in ("naive", "dapo", "prime"):
        problem = f"the reward manager {value!r} is not supported; functions score one answer at a time"
        raise UnsupportedValue(
            problem, "define `compute_score(data_source, solution_str, ground_truth, extra_info)` and write naive"
        )
