"""Reads the settings of a command: a run file, overridden by options of the command line."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from gateway.config.base import FrozenModel
from gateway.config.diagnostics import explain_validation_error
from gateway.config.environment import Expansion
from gateway.config.reader import parse_value, read_file
from gateway.errors import ConfigError, ConfigErrors
from trainer.cli.errors import NAMED_PATHS, RUN_FILE
from trainer.cli.options import find_jobs
from trainer.hub import HUB_NAME, find_model

MEANT_SETTINGS: Mapping[str, str] = {
    # models and data
    "model_path": "model", "model_name_or_path": "model", "model_name": "model", "base_model": "model",
    "dataset": "data", "train_files": "data", "train_dataset": "data", "dataset_name": "data",
    "val_files": "evaluation.data",
    "eval_dataset": "evaluation.data", "system_prompt": "system", "output_dir": "out", "run_name": "out",
    "max_steps": "steps", "total_training_steps": "steps", "num_generations": "n", "rollouts_per_example": "n",
    "group_size": "n", "n_samples_per_prompt": "n", "batch_size": "prompts", "train_batch_size": "prompts",
    "rollout_batch_size": "prompts", "report_to": "report", "logger": "report", "wandb": "report: [wandb]",
    "max_async_level": "max_staleness", "staleness_threshold": "max_staleness", "interaction": "curriculum.stages",
    # update
    "lora": "update.lora", "peft_config": "update.lora", "r": "rank", "lora_r": "update.lora.rank",
    "lora_rank": "update.lora.rank", "lora_alpha": "update.lora.alpha", "targets": "target_modules",
    "learning_rate": "update.lr", "lr": "update.lr", "optimizer": "update.optimizer",
    "weight_decay": "update.weight_decay",
    "warmup": "warmup_steps", "floor": "min_lr_ratio", "fall": "lr_scheduler",
    "lr_scheduler_type": "update.lr_scheduler",
    "clip": "max_grad_norm", "grad_clip": "update.max_grad_norm", "max_grad_norm": "update.max_grad_norm",
    "tokens": "micro_batch_tokens", "ppo_max_token_len_per_gpu": "update.micro_batch_tokens", "chunk": "logits_chunk",
    "checkpointing": "gradient_checkpointing", "gradient_checkpointing": "update.gradient_checkpointing",
    "vision": "freeze_vision", "freeze_vit": "update.freeze_vision", "ppo_epochs": "update.epochs",
    # algorithm
    "beta": "algorithm.kl.coefficient", "kl_coef": "algorithm.kl.coefficient",
    "kl_loss_coef": "algorithm.kl.coefficient",
    "place": "in_reward", "epsilon": "algorithm.clip_low", "epsilon_high": "algorithm.clip_high",
    "clip_ratio": "algorithm.clip_low", "loss_type": "algorithm.name", "adv_estimator": "algorithm.name",
    "loss_agg_mode": "algorithm.aggregate", "discount": "gamma", "trust": "lam", "rounds": "trained_turns",
    "dynamic": "dynamic_sampling", "filter_groups": "algorithm.dynamic_sampling", "draws": "algorithm.dynamic_sampling",
    "low": "bounds", "high": "bounds", "margin": "buffer", "cost": "penalty", "length": "aggregate",
    # rollouts
    "max_turns": "limits.assistant_turns", "max_assistant_turns": "limits.assistant_turns", "turns": "assistant_turns",
    "max_completion_length": "limits.response_tokens", "max_response_length": "limits.response_tokens",
    "max_new_tokens": "limits.turn_tokens", "max_tokens": "limits.turn_tokens",
    "max_model_len": "limits.rollout_tokens",
    "max_prompt_length": "limits.rollout_tokens", "wall_s": "timeout_s", "temperature": "sampling.temperature",
    "top_p": "sampling.top_p", "top_k": "sampling.top_k", "admission": "concurrency", "open": "inflight_rollouts",
    "writing": "running_requests", "max_num_seqs": "concurrency.running_requests", "groups": "max_retries",
    "max_running_requests": "concurrency.running_requests", "max_concurrent": "concurrency.inflight_rollouts",
    "silent_s": "heartbeat_timeout_s", "chat_template": "template.chat_template", "publish": "weight_sync",
    # the rest
    "reward_funcs": "reward.components", "reward_function": "reward.components", "rewards": "reward.components",
    "compute_score": "reward.components", "save_steps": "checkpoint.every", "save_freq": "checkpoint.every",
    "save_total_limit": "checkpoint.keep", "eval_steps": "evaluation.every", "test_freq": "evaluation.every",
    "few": "rows", "shuffled": "shuffle", "tensor": "tensor_parallel", "num_gpus": "distributed.ranks",
    "n_gpus_per_node": "distributed.ranks", "ranks": "distributed.ranks",
}  # fmt: skip
"""Only unknown keys are looked up; none of them is read."""


BESIDE = ("./", "../")
"""How a path begins that is seen from the run file's folder."""
EXISTING = ("tools", "mcp", "model", "data", "chat_template")
"""Settings that name what is there already; others, such as `out` or a prompt, need not."""
MAX_PATH = 4096
UNKNOWN_KEY = "unknown key"
Settings = TypeVar("Settings", bound=FrozenModel)


def find_run_file(name: str | Path) -> Path:
    """The path of a run file, given as a path or as the name of a job that comes with the package."""
    jobs = find_jobs()
    file = jobs.get(str(name), Path(name))
    if file.is_dir():
        files = sorted(path for path in file.glob("*.y*ml") if path.is_file())
        remedy = f"name the run file in it: {files[0] if files else file / 'run.yaml'}"
        raise ConfigError("is a folder, not a run file", file=file, field="--config", remedy=remedy)
    if not file.is_file():
        remedy = f"name a YAML file, or one of {', '.join(jobs)}"
        raise ConfigError("there is no such run file", file=file, field="--config", remedy=remedy)
    return file


def read_run_file(file: Path | None) -> dict[str, Any]:
    """The content of a run file; empty without one."""
    if file is None:
        return {}
    settings = read_file(file) or {}
    if not isinstance(settings, dict):
        raise ConfigError("is not a mapping", file=file, remedy="write settings as `name: value`")
    return settings


def load_settings(
    kind: type[Settings],
    file: Path | None,
    options: Mapping[str, Any],
    ignored: Collection[str] = (),
    overrides: Iterable[str] = (),
) -> Settings:
    """The settings of a run file, overridden by options of the command line that are not None, and by `key=value`.

    Settings of the file that are `ignored` belong to other commands.
    """
    RUN_FILE.set(file)
    content = {name: value for name, value in read_run_file(file).items() if name not in ignored}
    if file is not None:
        content = {name: _find_beside(value, file.parent, name) for name, value in content.items()}
    values = {**content, **{name: value for name, value in options.items() if value is not None}}
    values = override_settings(values, overrides)
    _remember_texts(content)
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        where = file or Path("the options")
        errors = explain_validation_error(error, values, where, Expansion({}, where), kind)
        raise ConfigErrors([_name_option(_name_meant(detail), options) for detail in errors]) from error


def fetch_model(settings: Settings) -> Settings:
    """The settings with the model's folder in place of its name on the hub."""
    given: Any = settings
    if not HUB_NAME.fullmatch(str(given.model)):
        return settings
    folder = find_model(given.model, with_code=given.trust_remote_code)
    return settings.model_copy(update={"model": type(given.model)(folder)})


def override_settings(values: dict[str, Any], words: Iterable[str]) -> dict[str, Any]:
    """The settings with those of words such as `update.lr=1e-4`, whose values are YAML."""
    values = deepcopy(values)
    for word in words:
        name, _, text = word.partition("=")
        *sections, key = name.split(".")
        inner: Any = values
        for depth, section in enumerate(sections, 1):
            if inner.get(section) is None:
                inner[section] = {}
            inner = inner[section]
            if not isinstance(inner, dict):
                remedy = f"write `{'.'.join(sections[:depth])}: {{...}}` in the run file, or set it as a whole"
                raise ConfigError(f"`{'.'.join(sections[:depth])}` is no section there", field=word, remedy=remedy)
        try:
            inner[key] = parse_value(text, Path("value.yaml"))
        except ConfigError as error:
            raise ConfigError(f"has no YAML value: {error.problem}", field=word, remedy="write KEY=VALUE") from error
    return values


def _name_meant(error: ConfigError) -> ConfigError:
    """The error about an unknown key, with what the key is called here."""
    owner, _, key = error.field.rpartition(".")
    meant = MEANT_SETTINGS.get(key)
    if error.problem != UNKNOWN_KEY or meant is None or meant == error.field:
        return error
    place = f"{owner}.{meant}" if owner and "." not in meant else meant
    return ConfigError(error.problem, file=error.file, field=error.field, remedy=f"you probably mean `{place}`")


def _find_beside(value: Any, folder: Path, name: str) -> Any:
    """The value, with each path that begins with `./` or `../` seen from the run file's folder, if it is there.

    What is not there is seen from the working folder, as other paths are; if it is nowhere, and has to be there, errors
    name it in the run file's folder. `./rewards.py:name` is such a path, too. `name` is the key of the value.
    """
    if isinstance(value, Mapping):
        return {key: _find_beside(item, folder, str(key)) for key, item in value.items()}
    if isinstance(value, list):
        return [_find_beside(item, folder, name) for item in value]
    if not isinstance(value, str) or not value.startswith(BESIDE) or len(value) > MAX_PATH or "\0" in value:
        return value
    path, colon, function = value.partition(":") if ".py:" in value else (value, "", "")
    found = os.path.abspath(folder / path)  # The run may be resumed from another working folder.
    is_missing = (name in EXISTING or bool(colon)) and not os.path.lexists(path)
    return f"{found}{colon}{function}" if os.path.lexists(found) or is_missing else value


def _remember_texts(content: Mapping[str, Any]) -> None:
    """Remembers every text of a run file, and refuses one that no path and no name can be."""
    texts = dict(_iterate_texts(content, ""))
    for name, text in texts.items():
        if "\0" in text:
            raise ConfigError("has a null character", field=name, remedy="write it without")
    NAMED_PATHS.set({**texts, **NAMED_PATHS.get()})


def _iterate_texts(value: Any, name: str) -> Iterator[tuple[str, str]]:
    """The texts in a value, each by its dotted name."""
    if isinstance(value, str | Path):
        yield name, str(value)
    items = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list | tuple) else ()
    for key, item in items:
        yield from _iterate_texts(item, f"{name}[{key}]" if isinstance(key, int) else f"{name}.{key}".lstrip("."))


def _name_option(error: ConfigError, options: Mapping[str, Any]) -> ConfigError:
    """The error with the option's name, if the value came from an option."""
    if options.get(error.field) is None:
        return error
    return ConfigError(error.problem, field=f"--{error.field}", remedy=error.remedy)
