"""Converts ms-swift's flags for data, batches, steps, weights, rollouts and rewards."""

from __future__ import annotations

from math import ceil
from pathlib import Path
from typing import Any

from mtrl_plugins.verl.key_rule import SourceConfig, UnsupportedValue, parse_count, parse_number
from mtrl_plugins.verl.model_keys import choose_reporters, load_rows

STEPPER = "mtrl_plugins.swift.stepper:named"
BUILTIN_SCHEDULERS = ("gym_scheduler", "math_tip_trick", "openenv_scheduler", "thinking_tips_scheduler")
"""Multi-turn schedulers that need no plug-in file."""
UNLIMITED = 1_000_000
"""Stands for no limit; the engine's context still applies."""
LR_SCHEDULES = {"linear": "line", "cosine": "cosine"}
REWARD_OPTIONS = ("soft_max_length", "soft_cache_length", "repetition_n_grams", "repetition_max_penalty", "seed")


def as_list(value: Any) -> list[Any]:
    """The values of a flag that may have none, one or several."""
    return [] if value in (None, "") else list(value) if isinstance(value, list) else [value]


def check_rlhf_type(value: Any, config: SourceConfig) -> None:
    """Rejects everything but GRPO."""
    if value != "grpo":
        raise UnsupportedValue(f"{value!r} is not supported", "write --rlhf_type grpo")


def data_files(value: Any, config: SourceConfig) -> str:
    """Paths of the training data."""
    names = [str(name) for name in as_list(value)]
    if not names:
        raise UnsupportedValue("is missing", "write --dataset FILE")
    if invalid := [name for name in names if "#" in name]:
        raise UnsupportedValue(
            f"{invalid[0]!r} selects a part of its rows", "write these rows into a file, and name it"
        )
    return ", ".join(names)


def system_text(value: Any, config: SourceConfig) -> Any:
    """The system message, or the content of the file that has it."""
    if not isinstance(value, str):
        return value
    if not value.endswith(".txt"):
        return value.replace("\\n", "\n")
    try:
        return Path(value).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise UnsupportedValue(
            f"cannot be read: {error}", "write the path of a text file, or the text itself"
        ) from error


def evaluation_files(value: Any, config: SourceConfig) -> str | None:
    """Paths of the evaluation data; None if there are none."""
    return data_files(value, config) if as_list(value) else None


# Batches


def process_count(config: SourceConfig) -> int:
    """The number of processes that share a batch."""
    return int(config["NPROC_PER_NODE"] or 1) * int(config["NNODES"] or 1)


def completions_per_update(config: SourceConfig) -> int:
    """Completions in one optimizer update."""
    if (total := config["global_batch_size"]) is not None:
        return parse_count(total)
    per_batch, steps = (
        config.count("per_device_train_batch_size") * process_count(config),
        config["gradient_accumulation_steps"],
    )
    return per_batch * (max(1, ceil(16 / per_batch)) if steps is None else parse_count(steps))


def completions_per_generation(config: SourceConfig) -> int:
    """Completions that are rolled out under the same weights."""
    generated, updated = _completions_at_once(config), completions_per_update(config)
    return updated if updated % generated == 0 else generated


def _completions_at_once(config: SourceConfig) -> int:
    if (total := config["generation_batch_size"]) is not None:
        return parse_count(total)
    if config["global_batch_size"] is not None:
        return completions_per_update(config) * parse_count(config["steps_per_generation"] or 1)
    per_batch, steps = (
        config.count("per_device_train_batch_size") * process_count(config),
        config["steps_per_generation"],
    )
    return completions_per_update(config) if steps is None else per_batch * parse_count(steps)


def prompts(value: Any, config: SourceConfig) -> int:
    """The number of prompts per step."""
    n, completions = config.count("num_generations"), completions_per_generation(config)
    if completions % n:
        remedy = f"write --generation_batch_size with a multiple of {n}"
        raise UnsupportedValue(
            f"{completions} completions cannot be divided into groups of {n}", remedy, "num_generations"
        )
    return completions // n


def minibatches(value: Any, config: SourceConfig) -> int:
    """The number of mini-batches per step."""
    generated, updated = completions_per_generation(config), completions_per_update(config)
    if generated % updated:
        problem = f"{generated} completions are generated at once, which is not a multiple of the {updated} per update"
        raise UnsupportedValue(problem, "make one a multiple of the other", "steps_per_generation")
    return generated // updated


def updates_per_step(config: SourceConfig) -> int:
    """The number of optimizer updates in a step of the run."""
    return minibatches(None, config) * config.count("num_iterations")


def steps(value: Any, config: SourceConfig) -> int:
    """The number of steps of the run; ms-swift counts optimizer updates."""
    if value is not None and parse_count(value) > 0:
        return max(1, parse_count(value) // updates_per_step(config))
    try:
        data_files(config["dataset"], config)
    except UnsupportedValue as error:  # Reported once, as the one flag that is missing.
        raise UnsupportedValue(error.problem, error.remedy, "dataset") from None
    epochs, batch = parse_number(config["num_train_epochs"]), prompts(None, config)
    rows = load_rows(config["dataset"], config)
    if rows is None:
        problem = f"cannot compute the steps of {epochs:g} epochs: the data is not on this machine"
        raise UnsupportedValue(problem, "write --max_steps N", "max_steps")
    return max(1, int(epochs * len(rows) / batch))


def step_interval(value: Any, config: SourceConfig) -> int | None:
    """An interval in steps of the run; ms-swift counts optimizer updates."""
    return None if value is None or parse_number(value) < 1 else max(1, parse_count(value) // updates_per_step(config))


def warmup(value: Any, config: SourceConfig) -> int:
    """The optimizer updates of the warmup."""
    if value is not None and parse_count(value) > 0:
        return parse_count(value)
    return int(parse_number(config["warmup_ratio"]) * steps(config["max_steps"], config) * updates_per_step(config))


def lr_schedule(value: Any, config: SourceConfig) -> dict[str, Any] | None:
    """The decay of the learning rate; None if it is constant."""
    if value in ("constant", "constant_with_warmup"):
        return None
    if value not in LR_SCHEDULES:
        raise UnsupportedValue(f"unknown schedule {value!r}", "write --lr_scheduler_type cosine, linear, or constant")
    return {
        "steps": steps(config["max_steps"], config) * updates_per_step(config),
        "floor": config.number("min_lr") / lr(config["learning_rate"], config),
        "fall": LR_SCHEDULES[value],
    }


# Weights


def lr(value: Any, config: SourceConfig) -> float:
    """The learning rate, by default that of LoRA or of full training."""
    return parse_number(value) if value is not None else 1e-5 if config["tuner_type"] == "full" else 1e-4


def lora(value: Any, config: SourceConfig) -> dict[str, Any] | None:
    """The LoRA settings; None if all weights are trained."""
    if value == "full":
        return None
    if value != "lora":
        raise UnsupportedValue(f"{value!r} is not supported", "write --tuner_type lora, or full")
    targets = as_list(config["target_modules"])
    settings: dict[str, Any] = {"rank": config.count("lora_rank"), "alpha": config.number("lora_alpha")}
    return settings if targets in ([], ["all-linear"]) else settings | {"targets": targets}


def dtype(value: Any, config: SourceConfig) -> str | None:
    """The dtype of matrix products."""
    if value not in (None, "bfloat16", "float32"):
        raise UnsupportedValue(f"{value!r} is not supported", "write --torch_dtype bfloat16, or float32")
    return value if isinstance(value, str) else None


def betas(value: Any, config: SourceConfig) -> list[float]:
    """The betas of Adam."""
    return [parse_number(value), config.number("adam_beta2")]


def vision(value: Any, config: SourceConfig) -> str:
    """Whether the vision encoder is frozen or trained."""
    if bool(value) != bool(config["freeze_aligner"]):
        problem = "the vision encoder and its aligner are frozen or trained together here"
        raise UnsupportedValue(problem, "set --freeze_vit and --freeze_aligner to the same value")
    return "frozen" if value else "trained"


def report(value: Any, config: SourceConfig) -> list[str] | None:
    """The trackers besides metrics.jsonl and TensorBoard."""
    return choose_reporters([str(name) for name in as_list(value)])


# Rollouts


def turn_tokens(value: Any, config: SourceConfig) -> int:
    """The token limit of one turn."""
    if config["completion_length_limit_scope"] == "total" and config["multi_turn_scheduler"]:
        problem = "a limit of all completions together is not supported"
        raise UnsupportedValue(problem, "write per_round, and --vllm_max_model_len", "completion_length_limit_scope")
    return parse_count(value)


def rollout_tokens(value: Any, config: SourceConfig) -> int:
    """The token limit of a whole rollout."""
    return UNLIMITED if value is None else parse_count(value)


def turn_limits(value: Any, config: SourceConfig) -> dict[str, int]:
    """The limits of assistant and user turns, which are equal; without a limit, only tokens limit a rollout."""
    limit = 1 if not config["multi_turn_scheduler"] else parse_count(value) if value else UNLIMITED
    return {"assistant_turns": limit, "user_turns": limit}


def stepper(value: Any, config: SourceConfig) -> str | None:
    """The stepper that runs ms-swift's multi-turn scheduler."""
    return STEPPER if value else None


def stepper_args(value: Any, config: SourceConfig) -> dict[str, Any] | None:
    """The scheduler's name, plug-in files and options."""
    if not (name := config["multi_turn_scheduler"]):
        return None
    args = {"name": name, "plugins": [str(file) for file in as_list(config["external_plugins"])]}
    if not args["plugins"] and name not in BUILTIN_SCHEDULERS:
        remedy = f"register it in a file and write --external_plugins FILE, or use {', '.join(BUILTIN_SCHEDULERS)}"
        raise UnsupportedValue(f"unknown scheduler {name!r}", remedy, "multi_turn_scheduler")
    options = {option: config[option] for option in ("max_turns", "gym_env", "context_manager")}
    return args | {option: value for option, value in options.items() if value is not None}


def chat_kwargs(value: Any, config: SourceConfig) -> dict[str, Any] | None:
    """The arguments of the chat template."""
    return None if value is None else {"enable_thinking": bool(value)}


# Rewards


def reward_components(value: Any, config: SourceConfig) -> dict[str, Any]:
    """One reward component for each reward function, and one for the gym environment."""
    names = [str(name) for name in as_list(value)]
    has_env = config["use_gym_env"] if config["use_gym_env"] is not None else config["gym_env"] is not None
    all_names = [*names, *(["gym_reward"] if has_env else [])]
    if not all_names:
        raise UnsupportedValue("there is no reward", "write --reward_funcs NAME, or --use_gym_env true")
    weights = as_list(config["reward_weights"]) or [1.0] * len(all_names)
    if len(weights) != len(all_names):
        problem = f"{len(weights)} weights for {len(all_names)} rewards ({', '.join(all_names)})"
        raise UnsupportedValue(problem, "write one weight per reward", "reward_weights")
    args = {
        "plugins": [str(Path(file)) for file in as_list(config["external_plugins"])],
        "options": reward_options(config),
    }
    components: dict[str, Any] = {}
    for name, weight in zip(names, weights, strict=False):
        function = {"function": "mtrl_plugins.swift.orm:named", "batched": True, "args": {"name": name, **args}}
        components[name] = function | {"weight": parse_number(weight)}
    if has_env:
        components["gym_reward"] = {"function": "mtrl_plugins.swift.orm:gym", "weight": parse_number(weights[-1])}
    return components


def reward_options(config: SourceConfig) -> dict[str, Any]:
    """The arguments that ms-swift's reward functions read from its options."""
    options = {name: config[name] for name in REWARD_OPTIONS if config[name] is not None}
    if "soft_cache_length" in options:
        options.setdefault("soft_max_length", config.count("max_completion_length"))
    return options | {"max_steps": steps(config["max_steps"], config)}
