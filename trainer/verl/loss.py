"""Advantages, clips, means and distances: what verl says with a few keys that bear on each other."""

from __future__ import annotations

from typing import Any

from trainer.verl.rollout import response
from trainer.verl.row import Asked, Make, No, count, number, only

ACTOR = "actor_rollout_ref.actor"
ALGORITHM = "algorithm"
MODE = f"{ACTOR}.policy_loss.loss_mode"
ESTIMATORS = {
    "grpo": "grpo",
    "grpo_vectorized": "grpo",
    "rloo": "rloo",
    "rloo_vectorized": "rloo",
    "reinforce_plus_plus": "reinforce_pp",
    "gae": "reinforce_pp",
}
DISTANCES = {
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
MEANS = {
    "token-mean": "token",
    "seq-mean-token-mean": "sequence",
    "seq-mean-token-sum": "constant",
    "seq-mean-token-sum-norm": "constant",
}


def name(value: Any, asked: Asked) -> str:
    if value not in ESTIMATORS:
        raise No(f"there are no advantages {value!r} here", f"write one of {', '.join(ESTIMATORS)}")
    found = ESTIMATORS[value]
    if found == "grpo" and asked[f"{ALGORITHM}.norm_adv_by_std_in_grpo"] is False:
        found = "dr_grpo"
    if (mode := asked[MODE]) != "vanilla":
        if mode not in ("gspo", "cispo"):
            raise No(f"there is no objective {mode!r} here", "write vanilla, gspo or cispo", MODE)
        if found != "grpo":
            raise No(f"{mode} goes with grpo's advantages here", "write `algorithm.adv_estimator=grpo`", MODE)
        found = mode
    if found == "rloo" and minibatches(None, asked) * epochs(None, asked) > 1:
        raise No(
            "verl clips rloo's steps after the first, and nothing is clipped here",
            "take one step: `actor_rollout_ref.actor.ppo_mini_batch_size` as large as `data.train_batch_size`",
        )
    return found


def credit(value: Any, asked: Asked) -> dict[str, Any] | None:
    estimator = asked["algorithm.adv_estimator"]
    discount, trust = asked.number("algorithm.gamma"), asked.number("algorithm.lam")
    if estimator == "gae":
        return {"kind": "gae", "discount": discount, "trust": trust}
    if estimator == "reinforce_plus_plus" and discount != 1:
        raise No("a discount by tokens goes with a critic here", "write `algorithm.gamma=1.0`", "algorithm.gamma")
    return None


def critic(value: Any, asked: Asked) -> dict[str, Any] | None:
    return {"lr": number(value)} if asked["algorithm.adv_estimator"] == "gae" else None


def for_critic(*allowed: Any, same: str = "", remedy: str) -> Make:
    """Where there is a critic, other values are refused, but for that of the policy's key `same`."""

    def make(value: Any, asked: Asked) -> None:
        if asked["algorithm.adv_estimator"] == "gae" and not (same and value == asked[same]):
            only(*allowed, remedy=remedy)(value, asked)

    return make


def minibatches(value: Any, asked: Asked) -> int:
    batch, mini = asked.count("data.train_batch_size"), asked.count(f"{ACTOR}.ppo_mini_batch_size")
    if mini > batch or batch % mini:
        problem = f"{mini} prompts do not divide the {batch} of data.train_batch_size"
        raise No(problem, f"write a divisor of {batch}", f"{ACTOR}.ppo_mini_batch_size")
    return batch // mini


def epochs(value: Any, asked: Asked) -> int:
    return asked.count(f"{ACTOR}.ppo_epochs")


def clip_low(value: Any, asked: Asked) -> float:
    return _side(f"{ACTOR}.clip_ratio_low", asked)


def clip_high(value: Any, asked: Asked) -> float:
    return _side(f"{ACTOR}.clip_ratio_high", asked)


def _side(key: str, asked: Asked) -> float:
    return asked.number(key if asked.has(key) and asked[key] is not None else f"{ACTOR}.clip_ratio")


def clip_dual(value: Any, asked: Asked) -> float | None:
    """Only the plain objective has one."""
    estimator = asked["algorithm.adv_estimator"]
    return number(value) if asked[MODE] == "vanilla" and ESTIMATORS.get(estimator) != "rloo" else None


def aggregate(value: Any, asked: Asked) -> str:
    """There, gspo has its own, whatever is written."""
    if value not in MEANS:
        raise No(f"there is no mean {value!r} here", f"write one of {', '.join(MEANS)}")
    return "sequence" if asked[MODE] == "gspo" else MEANS[value]


def length(value: Any, asked: Asked) -> int | None:
    mode = asked[f"{ACTOR}.loss_agg_mode"]
    if asked[MODE] == "gspo":
        return None
    if mode == "seq-mean-token-sum":
        return 1
    return count(value or response(asked)) if mode == "seq-mean-token-sum-norm" else None


def kl(value: Any, asked: Asked) -> dict[str, Any] | None:
    in_loss, in_reward = bool(asked[f"{ACTOR}.use_kl_loss"]), bool(asked["algorithm.use_kl_in_reward"])
    if in_loss and in_reward:
        raise No("a distance is either in the loss or in the reward here", "turn one of the two off")
    if in_loss:
        coefficient, key = asked.number(f"{ACTOR}.kl_loss_coef"), f"{ACTOR}.kl_loss_type"
    elif in_reward:
        if (how := asked["algorithm.kl_ctrl.type"]) != "fixed":
            raise No(f"a coefficient that is {how!r}", "write fixed", "algorithm.kl_ctrl.type")
        coefficient, key = asked.number("algorithm.kl_ctrl.kl_coef"), "algorithm.kl_penalty"
    else:
        return None
    if (kind := asked[key]) not in DISTANCES:
        raise No(f"there is no estimator {kind!r} here", f"write one of {', '.join(DISTANCES)}", key)
    return {"coefficient": coefficient, "estimator": DISTANCES[kind], "place": "loss" if in_loss else "reward"}


CORRECTION = "algorithm.rollout_correction"


def mismatch(value: Any, asked: Asked) -> dict[str, Any] | None:
    found: dict[str, Any] = {}
    if asked.has(f"{ACTOR}.tis_imp_ratio_cap") and (cap := asked.number(f"{ACTOR}.tis_imp_ratio_cap")) > 0:
        found = {"truncate": "token", "cap": cap}
    if (level := asked[f"{CORRECTION}.rollout_is"]) is not None:
        if level not in ("token", "sequence"):
            raise No(f"weights by {level!r}", "write token or sequence")
        found = {"truncate": level, "cap": asked.number(f"{CORRECTION}.rollout_is_threshold")}
    if (level := asked[f"{CORRECTION}.rollout_rs"]) is not None:
        if level not in ("token", "sequence", "geometric"):
            raise No(f"rejection by {level!r}", "write token, sequence or geometric", f"{CORRECTION}.rollout_rs")
        high, low = asked.number(f"{CORRECTION}.rollout_rs_threshold"), f"{CORRECTION}.rollout_rs_threshold_lower"
        found |= {"reject": level, "high": high, "low": asked.number(low) if asked.has(low) else 1 / high}
    return found or None


def overlong(value: Any, asked: Asked) -> dict[str, Any] | None:
    buffer = "reward_model.overlong_buffer"
    if not value:
        return None
    cost = asked.number(f"{buffer}.penalty_factor")
    return {"limit": response(asked), "margin": asked.count(f"{buffer}.len"), "cost": cost}
