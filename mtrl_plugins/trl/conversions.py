"""Converts arguments of TRL's GRPOConfig; `keys.yaml` names the function of each."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mtrl_plugins.scripts import conversions as shared
from mtrl_plugins.scripts.conversions import AGGREGATES, DEVIATION_EPSILON, UNLIMITED, lr_decay
from mtrl_plugins.scripts.key_table import KeyTable, SourceConfig, UnsupportedValue, parse_count, parse_number
from trainer.ledger import Author, Ledger

ROWS = "train_dataset_rows"
"""The key for the number of rows of `train_dataset`, from which epochs become steps."""
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
    if (fall := lr_decay(value)) is None:
        return None
    total = steps(config["max_steps"], config) * updates_per_step(config)
    return {"lr_scheduler": fall, "decay_steps": total, "min_lr_ratio": 0.0}


def token_limits(value: Any, config: SourceConfig) -> dict[str, int]:
    """The limit of all that follows the prompt, which a single turn may reach."""
    return {"response_tokens": parse_count(value), "turn_tokens": parse_count(value)}


def assistant_turns(value: Any, config: SourceConfig) -> int:
    """The most turns of the policy: one more than the rounds of calls."""
    return UNLIMITED if value is None else parse_count(value) + 1


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
    return settings if targets is None or isinstance(targets, str) else settings | {"target_modules": sorted(targets)}


MISMATCH_MODES = {
    "token_truncate": {"truncate": "token"},
    "sequence_truncate": {"truncate": "sequence"},
    "token_mask": {"truncate": "token", "reject": "token"},
    "sequence_mask": {"truncate": "sequence", "reject": "sequence"},
}
NO_LOWER_BOUND, NO_UPPER_BOUND = 1e-6, 1e6
"""Bounds of a ratio that is not bounded there."""


def algorithm(value: Any, config: SourceConfig) -> dict[str, Any]:
    """The algorithm for TRL's loss type, and how it averages token losses."""
    return {
        "name": _algorithm_name(value, config),
        "aggregate": config.count("max_completion_length") if value == "dr_grpo" else AGGREGATES[value],
        "deviation_epsilon": DEVIATION_EPSILON,
        **({"count_untrained": True} if config["mask_truncated_completions"] else {}),
    }


def _algorithm_name(value: Any, config: SourceConfig) -> str:
    level, scale = config["importance_sampling_level"], config["scale_rewards"]
    scale = {True: "group", False: "none"}.get(scale, scale)
    if value not in AGGREGATES:
        raise UnsupportedValue(f"the loss {value!r} is not here", f"write one of {', '.join(AGGREGATES)}")
    if level not in ("token", "sequence"):
        raise UnsupportedValue(f"unknown level {level!r}", "write token or sequence", "importance_sampling_level")
    if scale not in ("group", "none", "batch"):
        raise UnsupportedValue(f"unknown scaling {scale!r}", "write group, batch or none", "scale_rewards")
    special = "cispo" if value == "cispo" else "gspo" if level == "sequence" else ""
    if special and (scale != "group" or (value == "cispo" and level == "sequence")):
        problem = f"{special} is here with scaling by group only, and cispo and sequence level exclude each other"
        raise UnsupportedValue(problem, "remove one of the arguments", "scale_rewards")
    unscaled = {"none": "dr_grpo", "batch": "reinforce_pp_baseline"}.get(scale)
    return special or unscaled or ("dapo" if value == "dapo" else "grpo")


def entropy_bonus(value: Any, config: SourceConfig) -> float | None:
    """The weight of the entropy bonus, which TRL averages over tokens."""
    if parse_number(value) and AGGREGATES.get(config["loss_type"]) != "token":
        raise UnsupportedValue("here the bonus is averaged as losses are", "write a loss_type of dapo, bnpo or cispo")
    return parse_number(value) or None


def adaptive_entropy(value: Any, config: SourceConfig) -> dict[str, Any] | None:
    """What makes the weight of the bonus follow the entropy."""
    if not value:
        return None
    entropy_bonus(1.0, config)
    names = {"target": "entropy_target", **{name: f"entropy_coef_{name}" for name in ("delta", "min", "max")}}
    return {name: parse_number(config[key]) for name, key in names.items()}


def kl(value: Any, config: SourceConfig) -> dict[str, Any] | None:
    """The KL term of the loss."""
    if not parse_number(value):
        return None
    corrected = {"estimator": "k3+", "importance": "policy"}
    return {"coefficient": parse_number(value), **(corrected if config["use_bias_correction_kl"] else {})}


def mismatch(value: Any, config: SourceConfig) -> dict[str, Any] | None:
    """The correction of the mismatch between engine and trainer, which TRL makes with vLLM only."""
    if not config["use_vllm"]:
        return None
    if not value:
        return {"truncate": "never"}
    mode = config["vllm_importance_sampling_mode"]
    if mode not in MISMATCH_MODES:
        problem, known = f"unknown mode {mode!r}", ", ".join(MISMATCH_MODES)
        raise UnsupportedValue(problem, f"write one of {known}", "vllm_importance_sampling_mode")
    high, low = config["vllm_importance_sampling_clip_max"], config["vllm_importance_sampling_clip_min"]
    high = NO_UPPER_BOUND if high is None else parse_number(high, "vllm_importance_sampling_clip_max")
    if "reject" not in MISMATCH_MODES[mode]:
        if low is not None:
            problem = "weights have no lower bound here, where they are truncated"
            raise UnsupportedValue(problem, "remove it", "vllm_importance_sampling_clip_min")
        return MISMATCH_MODES[mode] | {"cap": high}
    low = NO_LOWER_BOUND if low is None else parse_number(low, "vllm_importance_sampling_clip_min")
    return MISMATCH_MODES[mode] | {"cap": high, "bounds": [low, high]}


def credit_rounds(value: Any, config: SourceConfig) -> str | None:
    """The token weights that leave out truncated rollouts."""
    return f"{not_truncated.__module__}:{not_truncated.__name__}" if value else None


def not_truncated(ledger: Ledger) -> list[float]:
    """Weighs the policy's tokens 1, or 0 if its last turn was truncated."""
    turns = ledger.turns
    is_whole = bool(turns) and turns[-1].finish_reason != "length"
    return [float(is_whole and entry.author is Author.POLICY) for entry in ledger for _ in entry.ids]


def known_dtype(value: Any, config: SourceConfig) -> str | None:
    """The dtype of a model, where updates have it too."""
    return value if value in DTYPES else None


TABLE_FILE = Path(__file__).with_name("keys.yaml")
TRL_TABLE = KeyTable.read(TABLE_FILE, vars(shared) | globals())
