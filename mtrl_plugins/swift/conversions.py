"""Converts values of ms-swift's flags; `keys.yaml` names the function of each."""

from __future__ import annotations

import json
from math import ceil
from pathlib import Path
from typing import Any

from mtrl_plugins.scripts import conversions as shared
from mtrl_plugins.scripts.conversions import (
    AGGREGATES,
    DEVIATION_EPSILON,
    UNLIMITED,
    as_list,
    load_rows,
    lr_decay,
)
from mtrl_plugins.scripts.key_table import KeyTable, SourceConfig, UnsupportedValue, parse_count, parse_number
from trainer.data.row_to_task import PROMPT_COLUMNS

STEPPER = "mtrl_plugins.swift.stepper:named"
BUILTIN_SCHEDULERS = ("gym_scheduler",)
"""Multi-turn schedulers that need no plug-in file."""
REWARD_OPTIONS = ("soft_max_length", "soft_cache_length", "repetition_n_grams", "repetition_max_penalty", "seed")


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


STOP_WORDS = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|end_of_text|>", "<|eom_id|>", "<end_of_turn>", "</s>")
"""Tokens at which the models that have them end a turn anyway."""
MEDIA_COLUMNS = ("images", "image", "videos", "video")
MAX_CHECKED_ROWS = 10_000


def check_stop_words(value: Any, config: SourceConfig) -> None:
    """Rejects words within a turn that would end it."""
    if words := [word for word in as_list(value) if word not in STOP_WORDS]:
        remedy = "remove it, and shorten the turn in the scheduler's `step`"
        raise UnsupportedValue(f"{words[0]!r} is not supported", remedy)


def check_columns(value: Any, config: SourceConfig) -> None:
    """Rejects other names of columns that are not read by either name."""
    renames = value.items() if isinstance(value, dict) else [(value, "")] if value else ()
    names = ("query", *PROMPT_COLUMNS)
    if wrong := [old for old, new in renames if old != new and not (old in PROMPT_COLUMNS and new in names)]:
        remedy = "rename the columns of the file to mtrl's names (docs/your-own-job.md)"
        raise UnsupportedValue(f"{wrong[0]!r} is not supported", remedy)


def check_max_pixels(value: Any, config: SourceConfig) -> None:
    """Rejects a size to which images would be scaled, if there are any and the model has another one."""
    if value is None:
        return
    rows = load_rows(config["dataset"], config)
    if rows is not None and not any(
        rows[index].get(name) for index in range(min(len(rows), MAX_CHECKED_ROWS)) for name in MEDIA_COLUMNS
    ):
        return
    file = Path(str(config["model"])).expanduser() / "preprocessor_config.json"
    try:
        has_same = json.loads(file.read_text(encoding="utf-8")).get("max_pixels") == value
    except (OSError, ValueError, AttributeError):
        has_same = False
    if not has_same:
        remedy = "remove it, and set `max_pixels` in preprocessor_config.json in the model's folder"
        raise UnsupportedValue(f"{value!r} is not supported", remedy)


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
    if (fall := lr_decay(value)) is None:
        return None
    return {
        "lr_scheduler": fall,
        "decay_steps": steps(config["max_steps"], config) * updates_per_step(config),
        "min_lr_ratio": config.number("min_lr") / lr(config["learning_rate"], config),
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
    return settings if targets in ([], ["all-linear"]) else settings | {"target_modules": targets}


def shared_rows(value: Any, config: SourceConfig) -> int | None:
    """How many ranks share every row, by either of two flags."""
    return shared.context_parallel("sequence_parallel_size", config) or shared.context_parallel(
        "context_parallel_size", config
    )


def vision(value: Any, config: SourceConfig) -> bool:
    """Whether the vision encoder is frozen."""
    if bool(value) != bool(config["freeze_aligner"]):
        problem = "the vision encoder and its aligner are frozen or trained together here"
        raise UnsupportedValue(problem, "set --freeze_vit and --freeze_aligner to the same value")
    return bool(value)


def dynamic_sampling(value: Any, config: SourceConfig) -> int:
    """How often groups without a learning signal are replaced."""
    return config.count("max_resample_times") if value else 0


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


CORRECTIONS = {
    "token_truncate": {"truncate": "token"},
    "sequence_truncate": {"truncate": "sequence"},
    "token_mask": {"reject": "token"},
    "sequence_mask": {"reject": "sequence"},
}
REQUIRED_SCALING = {"rloo": "none", "reinforce_plus_plus": "batch"}
"""Estimators that are separate algorithms, each with the only `scale_rewards` that it supports."""
BASE_LOSS_SCALES = ("default", "last_round", "all")
CALL_LOSS_SCALES = ("react", "hermes", "qwen", "agentflan", "alpha_umi", "base")
"""Loss scales that weigh tool calls, which has no effect in GRPO."""


def algorithm_name(value: Any, config: SourceConfig) -> str:
    """The algorithm for ms-swift's estimator, loss type, importance sampling level and reward scaling."""
    kind, level, scale = config["loss_type"], config["importance_sampling_level"], config["scale_rewards"]
    if value == "rloo" and updates_per_step(config) > 1:
        problem = "ms-swift clips the updates of rloo after the first, and mtrl does not"
        raise UnsupportedValue(problem, "make one update per step: remove --steps_per_generation and --num_iterations")
    if value in REQUIRED_SCALING:
        if kind != "grpo" or level != "token" or scale not in (None, REQUIRED_SCALING[value]):
            raise UnsupportedValue(
                "cannot be combined with another loss", "remove --loss_type, --scale_rewards and the like"
            )
        return "rloo" if value == "rloo" else "reinforce_pp_baseline"
    if value != "grpo":
        raise UnsupportedValue(f"unknown estimator {value!r}", "write grpo, rloo or reinforce_plus_plus")
    if level not in ("token", "sequence"):
        raise UnsupportedValue(f"unknown level {level!r}", "write token or sequence", "importance_sampling_level")
    if scale not in (None, "group", "none", True, False):
        raise UnsupportedValue(f"unknown scaling {scale!r}", "write group or none", "scale_rewards")
    is_unscaled = scale in ("none", False)
    if (kind == "cispo" or level == "sequence") and (is_unscaled or (kind == "cispo" and level == "sequence")):
        raise UnsupportedValue(
            "cispo and sequence level need scaling by group, and exclude each other", "remove one of the flags"
        )
    return "cispo" if kind == "cispo" else "gspo" if level == "sequence" else "dr_grpo" if is_unscaled else "grpo"


def aggregate(value: Any, config: SourceConfig) -> dict[str, Any]:
    """How token losses are averaged."""
    if value not in AGGREGATES:
        raise UnsupportedValue(f"unknown loss {value!r}", f"write one of {', '.join(AGGREGATES)}")
    return {
        "aggregate": config.count("max_completion_length") if value == "dr_grpo" else AGGREGATES[value],
        "deviation_epsilon": DEVIATION_EPSILON,
        **({"count_untrained": True} if config["overlong_filter"] else {}),
    }


def kl(value: Any, config: SourceConfig) -> dict[str, Any] | None:
    """The KL settings, in the loss or in the reward."""
    if not parse_number(value):
        return None
    in_reward = config["kl_in_reward"]
    if in_reward is None:
        in_reward = config["advantage_estimator"] != "grpo"
    kind = {"estimator": "k1" if in_reward else "k3", "in_reward": in_reward}
    return {"coefficient": parse_number(value), **kind}


def mismatch(value: Any, config: SourceConfig) -> dict[str, Any]:
    """The correction of the mismatch between engine and trainer."""
    if value is None:
        return {"truncate": "never"}
    if value not in CORRECTIONS:
        raise UnsupportedValue(f"unknown correction {value!r}", f"write one of {', '.join(CORRECTIONS)}")
    threshold, correction = config.number("rollout_importance_sampling_threshold"), CORRECTIONS[value]
    return {**correction, **({"cap": threshold} if "truncate" in correction else {"bounds": [1e-9, threshold]})}


def credit_rounds(value: Any, config: SourceConfig) -> str:
    """Which turns are trained, from ms-swift's loss scale."""
    names = str(value).split("+") if value else ["default" if config["multi_turn_scheduler"] else "last_round"]
    base = names.pop(0) if names[0] in BASE_LOSS_SCALES else "default"
    base = "default" if base == "all" else base
    if unknown := [
        name for name in names if name not in (*CALL_LOSS_SCALES, "ignore_empty_think", "ignore_think_prefix")
    ]:
        raise UnsupportedValue(
            f"unknown loss scale {unknown[0]!r}",
            f"write some of {', '.join((*BASE_LOSS_SCALES, *CALL_LOSS_SCALES))}, joined by +",
        )
    if config["overlong_filter"]:
        if names:
            raise UnsupportedValue(
                f"{names[0]!r} cannot be combined with --overlong_filter", "write --overlong_filter false", "loss_scale"
            )
        return f"mtrl_plugins.swift.loss_scale:{base}_overlong_filter"
    if variants := [name for name in names if name.startswith("ignore")]:
        return f"mtrl_plugins.swift.loss_scale:{'_'.join([base, *variants])}"
    return "mtrl_plugins.swift.loss_scale:last_round" if base == "last_round" else "all"


SWIFT_TABLE = KeyTable.read(Path(__file__).with_name("keys.yaml"), vars(shared) | globals())
