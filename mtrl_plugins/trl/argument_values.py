"""Converts arguments of TRL's GRPOConfig for batches, steps, learning rate, limits, trackers and adapters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mtrl_plugins.verl.key_rule import SourceConfig, UnsupportedValue, parse_count, parse_number
from mtrl_plugins.verl.model_keys import BUILTIN_REPORTERS, REPORTERS

UNLIMITED = 1_000_000
"""Stands for no limit; the engine's context still applies."""
ROWS = "train_dataset_rows"
"""The key for the number of rows of `train_dataset`, from which epochs become steps."""
LR_SCHEDULES = {"linear": "line", "cosine": "cosine"}
OPTIMIZERS = ("adamw_torch", "adamw_torch_fused", "adamw_hf")
DTYPES = ("auto", "float32", "bfloat16")
MODEL_DTYPE_KEYS = ("dtype", "torch_dtype")


def completions_per_generation(config: SourceConfig) -> int:
    """Completions that are generated at once."""
    if (total := config["generation_batch_size"]) is not None:
        return parse_count(total, "generation_batch_size")
    batch, steps = config.count("per_device_train_batch_size"), config["steps_per_generation"]
    return batch * (
        config.count("gradient_accumulation_steps") if steps is None else parse_count(steps, "steps_per_generation")
    )


def prompts(value: Any, config: SourceConfig) -> int:
    """The number of prompts per step."""
    n, completions = config.count("num_generations"), completions_per_generation(config)
    if n < 2 or completions % n:
        problem = f"{completions} completions cannot be divided into groups of {n}, of at least 2"
        remedy = "set generation_batch_size to a multiple of num_generations"
        raise UnsupportedValue(problem, remedy, "num_generations")
    return completions // n


def minibatches(value: Any, config: SourceConfig) -> int:
    """The number of mini-batches per step."""
    generated = completions_per_generation(config)
    updated = config.count("per_device_train_batch_size") * config.count("gradient_accumulation_steps")
    if generated % updated:
        problem = f"{generated} completions are generated at once, which is not a multiple of the {updated} per update"
        remedy = "make generation_batch_size a multiple of per_device_train_batch_size x gradient_accumulation_steps"
        raise UnsupportedValue(problem, remedy, "generation_batch_size")
    return generated // updated


def updates_per_step(config: SourceConfig) -> int:
    """The number of optimizer updates in a step of the run."""
    return minibatches(None, config) * config.count("num_iterations")


def steps(value: Any, config: SourceConfig) -> int:
    """The number of steps of the run; TRL counts optimizer updates."""
    if value is not None and parse_count(value) > 0:
        return max(1, parse_count(value) // updates_per_step(config))
    if (rows := config[ROWS]) is None:
        problem = "is needed: without a data set of known length, there are no epochs"
        raise UnsupportedValue(problem, "set max_steps", "max_steps")
    return max(1, int(parse_number(config["num_train_epochs"]) * int(rows) / prompts(None, config)))


def step_interval(value: Any, config: SourceConfig) -> int | None:
    """An interval in steps of the run; TRL counts optimizer updates."""
    if value is None or value == 0:
        return None
    total = steps(config["max_steps"], config)
    number = parse_number(value)
    return max(1, round(number * total) if number < 1 else int(number) // updates_per_step(config))


def save_interval(value: Any, config: SourceConfig) -> int | None:
    """Steps between checkpoints; None lets the run decide."""
    return step_interval(value, config) if config["save_strategy"] == "steps" else None


def evaluation_interval(value: Any, config: SourceConfig) -> int:
    """Steps between evaluations; 0 for none."""
    if value == "no":
        return 0
    if value == "epoch":
        return max(1, int(config[ROWS] or 0) // prompts(None, config))
    if value != "steps":
        raise UnsupportedValue(f"unknown strategy {value!r}", "write no, steps or epoch")
    interval = config["eval_steps"]
    return step_interval(config["logging_steps"] if interval is None else interval, config) or 1


def warmup(value: Any, config: SourceConfig) -> int:
    """The optimizer updates of the warmup, as a number or a share of all."""
    share = parse_number(config["warmup_ratio"] or 0)
    number = parse_number(value or 0)
    total = steps(config["max_steps"], config) * updates_per_step(config)
    return int(number) if number >= 1 else int(max(number, share) * total)


def lr_schedule(value: Any, config: SourceConfig) -> dict[str, Any] | None:
    """The decay of the learning rate; None if it is constant."""
    if value in ("constant", "constant_with_warmup"):
        return None
    if value not in LR_SCHEDULES:
        raise UnsupportedValue(f"unknown schedule {value!r}", "write linear, cosine or constant")
    total = steps(config["max_steps"], config) * updates_per_step(config)
    return {"steps": total, "floor": 0.0, "fall": LR_SCHEDULES[value]}


def betas(value: Any, config: SourceConfig) -> list[float]:
    """The betas of Adam."""
    return [parse_number(value), config.number("adam_beta2")]


def dtype(value: Any, config: SourceConfig) -> str | None:
    """The dtype of matrix products."""
    return None if value is None else "bfloat16" if value else "float32"


def token_limits(value: Any, config: SourceConfig) -> dict[str, int]:
    """The limit of all that follows the prompt, which a single turn may reach."""
    return {"response_tokens": parse_count(value), "turn_tokens": parse_count(value)}


def assistant_turns(value: Any, config: SourceConfig) -> int:
    """The most turns of the policy: one more than the rounds of calls."""
    return UNLIMITED if value is None else parse_count(value) + 1


def report(value: Any, config: SourceConfig) -> list[str] | None:
    """The trackers besides metrics.jsonl and TensorBoard."""
    names = [value] if isinstance(value, str) else [str(name) for name in value or ()]
    if unknown := [name for name in names if name not in (*REPORTERS, *BUILTIN_REPORTERS, "none")]:
        known = ", ".join((*REPORTERS, "tensorboard", "none"))
        raise UnsupportedValue(f"unknown tracker {unknown[0]!r}", f"write some of {known}")
    return [name for name in names if name in REPORTERS] or None


def keep_checkpoints(value: Any, config: SourceConfig) -> int | None:
    """How many checkpoints are kept: at least two, so that one is whole while another is written."""
    return None if value is None else max(2, parse_count(value))


def chat_template_kwargs(value: Any, config: SourceConfig) -> dict[str, Any] | None:
    """The arguments of the chat template."""
    return dict(value) if isinstance(value, Mapping) else None


def model_dtype(value: Any, config: SourceConfig) -> str | None:
    """The dtype among the keyword arguments of the model; there may be no others."""
    kwargs = dict(value or {})
    named = [str(kwargs.pop(key)).removeprefix("torch.") for key in MODEL_DTYPE_KEYS if key in kwargs]
    kwargs.pop("attn_implementation", None)
    if kwargs:
        problem = f"{', '.join(map(repr, kwargs))} cannot be passed on: a model is loaded from its folder as it is"
        raise UnsupportedValue(problem, "load the model yourself, `save_pretrained` it, and name that folder")
    if named and named[0] not in DTYPES:
        raise UnsupportedValue(f"{named[0]!r} is not supported", f"write one of {', '.join(DTYPES)}")
    return named[0] if named else None


def lora(value: Any, config: SourceConfig) -> dict[str, Any] | None:
    """The LoRA settings of a `peft.LoraConfig`, or of a mapping with its names."""
    if value is None:
        return None
    fields = dict(value) if isinstance(value, Mapping) else vars(value)
    if "r" not in fields:
        raise UnsupportedValue(f"a {type(value).__name__} is not supported", "pass a LoraConfig")
    targets = fields.get("target_modules")
    if isinstance(targets, str) and targets != "all-linear":
        raise UnsupportedValue(f"target_modules={targets!r} is a pattern", "list the layers' names")
    settings: dict[str, Any] = {"rank": fields["r"], "alpha": float(fields.get("lora_alpha") or 8)}
    return settings if targets is None or isinstance(targets, str) else settings | {"targets": sorted(targets)}
