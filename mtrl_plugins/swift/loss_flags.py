"""Converts ms-swift's flags for the algorithm, loss aggregation, clipping, KL, mismatch and loss scale."""

from __future__ import annotations

from typing import Any

from mtrl_plugins.swift.flag_values import updates_per_step
from mtrl_plugins.verl.key_rule import SourceConfig, UnsupportedValue, parse_number

CORRECTIONS = {
    "token_truncate": {"truncate": "token"},
    "sequence_truncate": {"truncate": "sequence"},
    "token_mask": {"reject": "token"},
    "sequence_mask": {"reject": "sequence"},
}
AGGREGATES = {"grpo": "sequence", "bnpo": "token", "dapo": "token", "cispo": "token", "dr_grpo": "constant"}
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
    length = {"length": config.count("max_completion_length")} if value == "dr_grpo" else {}
    return {"aggregate": AGGREGATES[value], **length}


def clip_low(value: Any, config: SourceConfig) -> float:
    """The lower clip bound."""
    return 1.0 if config["loss_type"] == "cispo" else parse_number(value)


def clip_high(value: Any, config: SourceConfig) -> float:
    """The upper clip bound."""
    bound = config.number("epsilon") if value is None else parse_number(value)
    if config["loss_type"] != "cispo":
        return bound
    if bound < 1:
        problem = f"cispo caps weights at {bound:g}, which is below 1, the weight of unchanged tokens"
        raise UnsupportedValue(
            problem, "write --epsilon_high 5, or another bound of at least 1", "loss_type" if value is None else ""
        )
    return round(bound - 1, 9)


def kl(value: Any, config: SourceConfig) -> dict[str, Any] | None:
    """The KL settings, in the loss or in the reward."""
    if not parse_number(value):
        return None
    in_reward = config["kl_in_reward"]
    if in_reward is None:
        in_reward = config["advantage_estimator"] != "grpo"
    kind = {"estimator": "k1", "place": "reward"} if in_reward else {"estimator": "k3", "place": "loss"}
    return {"coefficient": parse_number(value), **kind}


def mismatch(value: Any, config: SourceConfig) -> dict[str, Any] | None:
    """The correction of the mismatch between engine and trainer."""
    if value is None:
        return None
    if value not in CORRECTIONS:
        raise UnsupportedValue(f"unknown correction {value!r}", f"write one of {', '.join(CORRECTIONS)}")
    threshold, correction = config.number("rollout_importance_sampling_threshold"), CORRECTIONS[value]
    return {**correction, **({"cap": threshold} if "truncate" in correction else {"high": threshold, "low": 1e-9})}


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
