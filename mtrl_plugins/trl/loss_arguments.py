"""Converts arguments of TRL's GRPOConfig for the algorithm, its clips, KL, mismatch and truncated rollouts."""

from __future__ import annotations

from typing import Any

from mtrl_plugins.verl.key_rule import SourceConfig, UnsupportedValue, parse_number
from trainer.ledger import Author, Ledger

AGGREGATES = {"grpo": "sequence", "bnpo": "token", "dapo": "token", "cispo": "token", "dr_grpo": "constant"}
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
    length = {"length": config.count("max_completion_length")} if value == "dr_grpo" else {}
    return {"name": _algorithm_name(value, config), "aggregate": AGGREGATES[value], **length}


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
        raise UnsupportedValue(problem, "set epsilon_high to 5, or another bound of at least 1", "epsilon_high")
    return round(bound - 1, 9)


def kl(value: Any, config: SourceConfig) -> dict[str, Any] | None:
    """The KL term of the loss."""
    if not parse_number(value):
        return None
    return {"coefficient": parse_number(value), "estimator": "k3+" if config["use_bias_correction_kl"] else "k3"}


def mismatch(value: Any, config: SourceConfig) -> dict[str, Any] | None:
    """The correction of the mismatch between engine and trainer, which TRL makes with vLLM only."""
    if not value or not config["use_vllm"]:
        return None
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
    return MISMATCH_MODES[mode] | {"cap": high, "high": high, "low": low}


def credit_rounds(value: Any, config: SourceConfig) -> str | None:
    """The token weights that leave out truncated rollouts."""
    return f"{not_truncated.__module__}:{not_truncated.__name__}" if value else None


def not_truncated(ledger: Ledger) -> list[float]:
    """Weighs the policy's tokens 1, or 0 if its last turn was truncated."""
    turns = ledger.turns
    is_whole = bool(turns) and turns[-1].finish_reason != "length"
    return [float(is_whole and entry.author is Author.POLICY) for entry in ledger for _ in entry.ids]
