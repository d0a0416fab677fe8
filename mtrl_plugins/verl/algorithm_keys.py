"""Converts verl's keys for advantages, clipping, loss aggregation, KL and mismatch correction."""

from __future__ import annotations

from typing import Any

from mtrl_plugins.verl.key_rule import Convert, SourceConfig, UnsupportedValue, allow_only, parse_count, parse_number
from mtrl_plugins.verl.rollout_keys import max_response_tokens

ACTOR = "actor_rollout_ref.actor"
ALGORITHM = "algorithm"
LOSS_MODE = f"{ACTOR}.policy_loss.loss_mode"
ESTIMATORS = {
    "grpo": "grpo",
    "grpo_vectorized": "grpo",
    "rloo": "rloo",
    "rloo_vectorized": "rloo",
    "reinforce_plus_plus": "reinforce_pp",
    "gae": "reinforce_pp",
}
KL_ESTIMATORS = {
    "kl": "k1",
    "k1": "k1",
    "mse": "k2",
    "k2": "k2",
    "low_var_kl": "k3",
    "k3": "k3",
    "kl+": "k1+",
    "k1+": "k1+",
    "low_var_kl+": "k3+",
    "k3+": "k3+",
}
AGGREGATES = {
    "token-mean": "token",
    "seq-mean-token-mean": "sequence",
    "seq-mean-token-sum": "constant",
    "seq-mean-token-sum-norm": "constant",
}


def algorithm_name(value: Any, config: SourceConfig) -> str:
    """The algorithm for verl's advantage estimator and loss mode."""
    if value not in ESTIMATORS:
        raise UnsupportedValue(f"unknown estimator {value!r}", f"write one of {', '.join(ESTIMATORS)}")
    algorithm = ESTIMATORS[value]
    if algorithm == "grpo" and config[f"{ALGORITHM}.norm_adv_by_std_in_grpo"] is False:
        algorithm = "dr_grpo"
    if (mode := config[LOSS_MODE]) != "vanilla":
        if mode not in ("gspo", "cispo"):
            raise UnsupportedValue(f"unknown loss mode {mode!r}", "write vanilla, gspo or cispo", LOSS_MODE)
        if algorithm != "grpo":
            raise UnsupportedValue(f"{mode} needs grpo's advantages", "write `algorithm.adv_estimator=grpo`", LOSS_MODE)
        algorithm = mode
    if algorithm == "rloo" and minibatches(None, config) * epochs(None, config) > 1:
        raise UnsupportedValue(
            "verl clips the updates of rloo after the first, and mtrl does not",
            "make one update a step: set `actor_rollout_ref.actor.ppo_mini_batch_size` to `data.train_batch_size`",
        )
    return algorithm


def credit(value: Any, config: SourceConfig) -> dict[str, Any] | None:
    """The credit settings: GAE with its discount and lambda, or none."""
    estimator = config["algorithm.adv_estimator"]
    discount, trust = config.number("algorithm.gamma"), config.number("algorithm.lam")
    if estimator == "gae":
        return {"kind": "gae", "discount": discount, "trust": trust}
    if estimator == "reinforce_plus_plus" and discount != 1:
        raise UnsupportedValue(
            "a discount per token needs a critic (gae)", "write `algorithm.gamma=1.0`", "algorithm.gamma"
        )
    return None


def critic(value: Any, config: SourceConfig) -> dict[str, Any] | None:
    """The critic's settings, if the estimator is gae."""
    return {"lr": parse_number(value)} if config["algorithm.adv_estimator"] == "gae" else None


def allow_only_with_critic(*allowed: Any, same: str = "", remedy: str) -> Convert:
    """A conversion that, with a critic, rejects values except `allowed` and the value of the policy's key `same`."""

    def convert(value: Any, config: SourceConfig) -> None:
        if config["algorithm.adv_estimator"] == "gae" and not (same and value == config[same]):
            allow_only(*allowed, remedy=remedy)(value, config)

    return convert


def minibatches(value: Any, config: SourceConfig) -> int:
    """The number of mini-batches per step; verl gives the prompts of one."""
    batch, mini = config.count("data.train_batch_size"), config.count(f"{ACTOR}.ppo_mini_batch_size")
    if mini > batch or batch % mini:
        problem = f"{mini} prompts do not divide data.train_batch_size {batch}"
        raise UnsupportedValue(problem, f"write a divisor of {batch}", f"{ACTOR}.ppo_mini_batch_size")
    return batch // mini


def epochs(value: Any, config: SourceConfig) -> int:
    """The number of epochs over a step's rollouts."""
    return config.count(f"{ACTOR}.ppo_epochs")


def clip_low(value: Any, config: SourceConfig) -> float:
    """The lower clip bound."""
    return _clip_bound(f"{ACTOR}.clip_ratio_low", config)


def clip_high(value: Any, config: SourceConfig) -> float:
    """The upper clip bound."""
    return _clip_bound(f"{ACTOR}.clip_ratio_high", config)


def _clip_bound(key: str, config: SourceConfig) -> float:
    return config.number(key if config.has(key) and config[key] is not None else f"{ACTOR}.clip_ratio")


def clip_dual(value: Any, config: SourceConfig) -> float | None:
    """The dual clip, which only the vanilla objective has."""
    estimator = config["algorithm.adv_estimator"]
    return parse_number(value) if config[LOSS_MODE] == "vanilla" and ESTIMATORS.get(estimator) != "rloo" else None


def aggregate(value: Any, config: SourceConfig) -> str:
    """The aggregation; in verl, gspo always has its own."""
    if value not in AGGREGATES:
        raise UnsupportedValue(f"unknown aggregation {value!r}", f"write one of {', '.join(AGGREGATES)}")
    return "sequence" if config[LOSS_MODE] == "gspo" else AGGREGATES[value]


def aggregate_length(value: Any, config: SourceConfig) -> int | None:
    """The constant that token sums are divided by, if the aggregation has one."""
    mode = config[f"{ACTOR}.loss_agg_mode"]
    if config[LOSS_MODE] == "gspo":
        return None
    if mode == "seq-mean-token-sum":
        return 1
    return parse_count(value or max_response_tokens(config)) if mode == "seq-mean-token-sum-norm" else None


def kl(value: Any, config: SourceConfig) -> dict[str, Any] | None:
    """The KL settings, in the loss or in the reward."""
    in_loss, in_reward = bool(config[f"{ACTOR}.use_kl_loss"]), bool(config["algorithm.use_kl_in_reward"])
    if in_loss and in_reward:
        raise UnsupportedValue("KL is either in the loss or in the reward, not in both", "turn one of them off")
    if in_loss:
        coefficient, key = config.number(f"{ACTOR}.kl_loss_coef"), f"{ACTOR}.kl_loss_type"
    elif in_reward:
        if (kind := config["algorithm.kl_ctrl.type"]) != "fixed":
            raise UnsupportedValue(f"{kind!r} is not supported", "write fixed", "algorithm.kl_ctrl.type")
        coefficient, key = config.number("algorithm.kl_ctrl.kl_coef"), "algorithm.kl_penalty"
    else:
        return None
    if (kind := config[key]) not in KL_ESTIMATORS:
        raise UnsupportedValue(f"unknown estimator {kind!r}", f"write one of {', '.join(KL_ESTIMATORS)}", key)
    return {"coefficient": coefficient, "estimator": KL_ESTIMATORS[kind], "place": "loss" if in_loss else "reward"}


CORRECTION = "algorithm.rollout_correction"


def mismatch(value: Any, config: SourceConfig) -> dict[str, Any] | None:
    """The correction of the mismatch between engine and trainer: truncated weights, rejection or both."""
    settings: dict[str, Any] = {}
    if config.has(f"{ACTOR}.tis_imp_ratio_cap") and (cap := config.number(f"{ACTOR}.tis_imp_ratio_cap")) > 0:
        settings = {"truncate": "token", "cap": cap}
    if (level := config[f"{CORRECTION}.rollout_is"]) is not None:
        if level not in ("token", "sequence"):
            raise UnsupportedValue(f"unknown level {level!r}", "write token or sequence")
        settings = {"truncate": level, "cap": config.number(f"{CORRECTION}.rollout_is_threshold")}
    if (level := config[f"{CORRECTION}.rollout_rs"]) is not None:
        if level not in ("token", "sequence", "geometric"):
            raise UnsupportedValue(
                f"unknown level {level!r}", "write token, sequence or geometric", f"{CORRECTION}.rollout_rs"
            )
        high, low = config.number(f"{CORRECTION}.rollout_rs_threshold"), f"{CORRECTION}.rollout_rs_threshold_lower"
        settings |= {"reject": level, "high": high, "low": config.number(low) if config.has(low) else 1 / high}
    return settings or None


def overlong(value: Any, config: SourceConfig) -> dict[str, Any] | None:
    """The penalty for responses that are nearly too long."""
    buffer = "reward_model.overlong_buffer"
    if not value:
        return None
    cost = config.number(f"{buffer}.penalty_factor")
    return {"limit": max_response_tokens(config), "margin": config.count(f"{buffer}.len"), "cost": cost}
