"""Batches, losses, rollouts: what ms-swift says with a few flags that bear on each other."""

from __future__ import annotations

from math import ceil
from pathlib import Path
from typing import Any

from trainer.verl.model import AT_HAND, TELLS, rows_of
from trainer.verl.row import Asked, No, count, number

NAMED = "trainer.swift.stepper:named"
SCHEDULERS = ("gym_scheduler", "math_tip_trick", "thinking_tips_scheduler")
"""Those that are there without a plug-in file."""
AS_LONG_AS_IT_FITS = 1_000_000
"""Where only the engine's context is the limit."""
CORRECTIONS = {
    "token_truncate": {"truncate": "token"},
    "sequence_truncate": {"truncate": "sequence"},
    "token_mask": {"reject": "token"},
    "sequence_mask": {"reject": "sequence"},
}
MEANS = {"grpo": "sequence", "bnpo": "token", "dapo": "token", "cispo": "token", "dr_grpo": "constant"}
WHOLE = {"rloo": "none", "reinforce_plus_plus": "batch"}
"""Advantages that are algorithms of their own, each with the only `scale_rewards` that it goes with."""
FALLS = {"linear": "line", "cosine": "cosine"}
SCALES = ("default", "last_round", "all")
TAGS = ("react", "hermes", "qwen", "agentflan", "alpha_umi", "base")
"""Loss scales that weigh calls, which is no more than a mask in GRPO, and then nothing."""
OPTIONS = ("soft_max_length", "soft_cache_length", "repetition_n_grams", "repetition_max_penalty", "seed")


def listed(value: Any) -> list[Any]:
    return [] if value in (None, "") else list(value) if isinstance(value, list) else [value]


def rlhf_type(value: Any, asked: Asked) -> None:
    if value != "grpo":
        raise No(f"is {value!r}", "write --rlhf_type grpo: nothing else is trained here")


def data(value: Any, asked: Asked) -> str:
    names = [str(name) for name in listed(value)]
    if not names:
        raise No("is missing", "write --dataset FILE")
    if odd := [name for name in names if "#" in name]:
        raise No(f"{odd[0]!r} draws a part of its rows", "write these rows into a file, and name that")
    return ", ".join(names)


def system(value: Any, asked: Asked) -> Any:
    """The words, or the file that has them."""
    if not isinstance(value, str):
        return value
    if not value.endswith(".txt"):
        return value.replace("\\n", "\n")
    try:
        return Path(value).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise No(f"cannot be read: {error}", "write the path of a text file, or the words themselves") from error


def held_out(value: Any, asked: Asked) -> str | None:
    return data(value, asked) if listed(value) else None


# Batches


def processes(asked: Asked) -> int:
    return int(asked["NPROC_PER_NODE"] or 1) * int(asked["NNODES"] or 1)


def gathered(asked: Asked) -> int:
    """Completions of one step of the optimizer."""
    each, steps = asked.count("per_device_train_batch_size") * processes(asked), asked["gradient_accumulation_steps"]
    return each * (max(1, ceil(16 / each)) if steps is None else count(steps))


def generated(asked: Asked) -> int:
    """Completions that are rolled out at one time."""
    if (whole := asked["generation_batch_size"]) is not None:
        return count(whole)
    each, steps = asked.count("per_device_train_batch_size") * processes(asked), asked["steps_per_generation"]
    return gathered(asked) if steps is None else each * count(steps)


def prompts(value: Any, asked: Asked) -> int:
    n, whole = asked.count("num_generations"), generated(asked)
    if whole % n:
        remedy = f"write --generation_batch_size with a multiple of {n}"
        raise No(f"{whole} completions at one time are no whole groups of {n}", remedy, "num_generations")
    return whole // n


def minibatches(value: Any, asked: Asked) -> int:
    whole, part = generated(asked), gathered(asked)
    if whole % part:
        problem = f"{whole} completions are rolled out, and {part} are learned from at one time"
        raise No(problem, "let one be a multiple of the other", "steps_per_generation")
    return whole // part


def updates(asked: Asked) -> int:
    """Of the optimizer, in one step of ours."""
    return minibatches(None, asked) * asked.count("num_iterations")


def steps(value: Any, asked: Asked) -> int:
    if value is not None and count(value) > 0:
        return max(1, count(value) // updates(asked))
    epochs, batch = number(asked["num_train_epochs"]), prompts(None, asked)
    rows = rows_of(asked["dataset"], asked)
    if rows is None:
        problem = f"how many steps {epochs:g} epochs are cannot be told: the data is not on this machine"
        raise No(problem, "write --max_steps N", "max_steps")
    return max(1, int(epochs * len(rows) / batch))


def each_so_often(value: Any, asked: Asked) -> int | None:
    """Their steps are the optimizer's."""
    return None if value is None or number(value) < 1 else max(1, count(value) // updates(asked))


def warmup(value: Any, asked: Asked) -> int:
    if value is not None and count(value) > 0:
        return count(value)
    return int(number(asked["warmup_ratio"]) * steps(asked["max_steps"], asked) * updates(asked))


def falls(value: Any, asked: Asked) -> dict[str, Any] | None:
    if value in ("constant", "constant_with_warmup"):
        return None
    if value not in FALLS:
        raise No(f"a rate that falls as {value!r}", "write --lr_scheduler_type cosine, linear, or constant")
    return {"steps": steps(asked["max_steps"], asked) * updates(asked), "floor": 0.0, "fall": FALLS[value]}


# Weights


def lr(value: Any, asked: Asked) -> float:
    return number(value) if value is not None else 1e-5 if asked["tuner_type"] == "full" else 1e-4


def lora(value: Any, asked: Asked) -> dict[str, Any] | None:
    if value == "full":
        return None
    if value != "lora":
        raise No(f"{value!r} cannot be had here", "write --tuner_type lora, or full")
    targets = listed(asked["target_modules"])
    found: dict[str, Any] = {"rank": asked.count("lora_rank"), "alpha": asked.number("lora_alpha")}
    return found if targets in ([], ["all-linear"]) else found | {"targets": targets}


def dtype(value: Any, asked: Asked) -> str | None:
    if value not in (None, "bfloat16", "float32"):
        raise No(f"products in {value!r}", "write --torch_dtype bfloat16, or float32")
    return value if isinstance(value, str) else None


def betas(value: Any, asked: Asked) -> list[float]:
    return [number(value), asked.number("adam_beta2")]


def vision(value: Any, asked: Asked) -> str:
    if bool(value) != bool(asked["freeze_aligner"]):
        problem = "what sees, and what leads from there to the words, are one part here"
        raise No(problem, "write --freeze_vit and --freeze_aligner alike")
    return "frozen" if value else "trained"


def report(value: Any, asked: Asked) -> list[str] | None:
    names = [str(name) for name in listed(value)]
    if odd := [name for name in names if name not in (*TELLS, *AT_HAND, "none")]:
        raise No(f"nobody here tells {odd[0]!r}", f"write some of {', '.join((*TELLS, *AT_HAND))}")
    return [name for name in names if name in TELLS] or None


# Rollouts


def turn_tokens(value: Any, asked: Asked) -> int:
    if asked["completion_length_limit_scope"] == "total" and asked["multi_turn_scheduler"]:
        problem = "the turns of a rollout share no limit here but the whole rollout's"
        raise No(problem, "write per_round, and --vllm_max_model_len", "completion_length_limit_scope")
    return count(value)


def rollout_tokens(value: Any, asked: Asked) -> int:
    return AS_LONG_AS_IT_FITS if value is None else count(value)


def turns(value: Any, asked: Asked) -> dict[str, int]:
    """As many answers as turns; a scheduler that says nothing has no limit but the tokens."""
    most = 1 if not asked["multi_turn_scheduler"] else count(value) if value else AS_LONG_AS_IT_FITS
    return {"assistant_turns": most, "user_turns": most}


def stepper(value: Any, asked: Asked) -> str | None:
    return NAMED if value else None


def stepper_args(value: Any, asked: Asked) -> dict[str, Any] | None:
    if not (name := asked["multi_turn_scheduler"]):
        return None
    found = {"name": name, "plugins": [str(file) for file in listed(asked["external_plugins"])]}
    if not found["plugins"] and name not in SCHEDULERS:
        remedy = f"register it in a file of yours, and write --external_plugins FILE; there are {', '.join(SCHEDULERS)}"
        raise No(f"no scheduler {name!r} comes with mtrl", remedy, "multi_turn_scheduler")
    others = {one: asked[one] for one in ("max_turns", "gym_env", "context_manager")}
    return found | {one: said for one, said in others.items() if said is not None}


def chat_kwargs(value: Any, asked: Asked) -> dict[str, Any] | None:
    return None if value is None else {"enable_thinking": bool(value)}


# Rewards


def rewards(value: Any, asked: Asked) -> dict[str, Any]:
    names = [str(name) for name in listed(value)]
    env = asked["use_gym_env"] if asked["use_gym_env"] is not None else asked["gym_env"] is not None
    told = [*names, *(["gym_reward"] if env else [])]
    if not told:
        raise No("nothing is rewarded", "write --reward_funcs NAME, or --use_gym_env true")
    weights = listed(asked["reward_weights"]) or [1.0] * len(told)
    if len(weights) != len(told):
        problem = f"{len(weights)} weights for {len(told)} rewards ({', '.join(told)})"
        raise No(problem, "write one for each", "reward_weights")
    args = {"plugins": [str(Path(file)) for file in listed(asked["external_plugins"])], "options": options(asked)}
    found: dict[str, Any] = {}
    for name, weight in zip(names, weights, strict=False):
        function = {"function": "trainer.swift.reward:named", "batched": True, "args": {"name": name, **args}}
        found[name] = function | {"weight": number(weight)}
    if env:
        found["gym_reward"] = {"function": "trainer.swift.reward:gym", "weight": number(weights[-1])}
    return found


def options(asked: Asked) -> dict[str, Any]:
    found = {name: asked[name] for name in OPTIONS if asked[name] is not None}
    if "soft_cache_length" in found:
        found.setdefault("soft_max_length", asked.count("max_completion_length"))
    return found | {"max_steps": steps(asked["max_steps"], asked)}


# Loss


def algorithm(value: Any, asked: Asked) -> str:
    kind, level, scale = asked["loss_type"], asked["importance_sampling_level"], asked["scale_rewards"]
    if value == "rloo" and updates(asked) > 1:
        problem = "ms-swift clips rloo's steps after the first, and nothing is clipped here"
        raise No(problem, "take one step: leave --steps_per_generation and --num_iterations out")
    if value in WHOLE:
        if kind != "grpo" or level != "token" or scale not in (None, WHOLE[value]):
            raise No("goes with no other loss here", "leave --loss_type, --scale_rewards and the like out")
        return "rloo" if value == "rloo" else "reinforce_pp_baseline"
    if value != "grpo":
        raise No(f"there are no advantages {value!r}", "write grpo, rloo or reinforce_plus_plus")
    if level not in ("token", "sequence"):
        raise No(f"weights by {level!r}", "write token or sequence", "importance_sampling_level")
    if scale not in (None, "group", "none", True, False):
        raise No(f"rewards scaled by {scale!r}", "write group or none", "scale_rewards")
    plain = scale in ("none", False)
    if (kind == "cispo" or level == "sequence") and (plain or (kind == "cispo" and level == "sequence")):
        raise No("goes with advantages scaled by group, and with one of cispo and sequences", "leave one of them out")
    return "cispo" if kind == "cispo" else "gspo" if level == "sequence" else "dr_grpo" if plain else "grpo"


def aggregate(value: Any, asked: Asked) -> dict[str, Any]:
    if value not in MEANS:
        raise No(f"there is no loss {value!r} here", f"write one of {', '.join(MEANS)}")
    length = {"length": asked.count("max_completion_length")} if value == "dr_grpo" else {}
    return {"aggregate": MEANS[value], **length}


def clip_low(value: Any, asked: Asked) -> float:
    return 1.0 if asked["loss_type"] == "cispo" else number(value)


def clip_high(value: Any, asked: Asked) -> float:
    most = asked.number("epsilon") if value is None else number(value)
    if asked["loss_type"] != "cispo":
        return most
    if most < 1:
        problem = f"cispo weighs with {most:g} at the most, and so cuts off what has not even changed"
        raise No(problem, "write --epsilon_high 5, or another bound from 1 up", "loss_type" if value is None else "")
    return round(most - 1, 9)


def kl(value: Any, asked: Asked) -> dict[str, Any] | None:
    if not number(value):
        return None
    in_reward = asked["kl_in_reward"]
    if in_reward is None:
        in_reward = asked["advantage_estimator"] != "grpo"
    kind = {"estimator": "k1", "place": "reward"} if in_reward else {"estimator": "k3", "place": "loss"}
    return {"coefficient": number(value), **kind}


def mismatch(value: Any, asked: Asked) -> dict[str, Any] | None:
    if value is None:
        return None
    if value not in CORRECTIONS:
        raise No(f"there is no correction {value!r}", f"write one of {', '.join(CORRECTIONS)}")
    most, found = asked.number("rollout_importance_sampling_threshold"), CORRECTIONS[value]
    return {**found, **({"cap": most} if "truncate" in found else {"high": most, "low": 1e-9})}


def rounds(value: Any, asked: Asked) -> str:
    names = str(value).split("+") if value else ["default" if asked["multi_turn_scheduler"] else "last_round"]
    base = names.pop(0) if names[0] in SCALES else "default"
    base = "default" if base == "all" else base
    if odd := [name for name in names if name not in (*TAGS, "ignore_empty_think", "ignore_think_prefix")]:
        raise No(f"there is no loss scale {odd[0]!r}", f"write some of {', '.join((*SCALES, *TAGS))}, joined by +")
    if told := [name for name in names if name.startswith("ignore")]:
        return f"trainer.swift.scales:{'_'.join([base, *told])}"
    return "trainer.swift.scales:last_round" if base == "last_round" else "all"
