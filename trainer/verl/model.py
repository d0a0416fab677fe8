"""Weights, data, steps, and the run: what verl says with a few keys that bear on each other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trainer.data.rows import Rows, find
from trainer.verl import loss
from trainer.verl.rollout import prompt, response
from trainer.verl.row import Asked, No, count, number

MODEL = "actor_rollout_ref.model"
OPTIM = "actor_rollout_ref.actor.optim"
TELLS = ("wandb", "mlflow", "trackio")
AT_HAND = ("console", "tensorboard", "file")
SCORED = "openai/gsm8k"
PLACES = (
    "optimizer_offload_fraction",
    "overlap_cpu_optimizer_d2h_h2d",
    "use_precision_aware_optimizer",
    "optimizer_cpu_offload",
)
"""Of an optimizer's settings, those that say where its state lies."""
LOOKED_AT = 10_000
"""Rows whose data source is looked at before anything starts."""


def path(value: Any, asked: Asked) -> str:
    """As it is; a name that is no path here is passed on."""
    if not isinstance(value, str) or not value:
        raise No("is missing", "write the path of a model's folder")
    return str(Path(value).expanduser()) if value.startswith("~") else value


def files(value: Any, asked: Asked) -> str | None:
    """Several have commas between them."""
    if value in (None, [], ""):
        return None
    named = value if isinstance(value, list) else [value]
    if odd := [one for one in named if not isinstance(one, str)]:
        raise No(f"{odd[0]!r} is no path", "write the path of a file")
    return ", ".join(path(one, asked) for one in named)


def train_files(value: Any, asked: Asked) -> str:
    found = files(value, asked)
    if found is None:
        raise No("is missing", "write the path of a file")
    return found


def rows_of(value: Any, asked: Asked) -> Rows | None:
    """The rows, where they lie on this machine: nothing is fetched to translate a file."""
    try:
        found = files(value, asked)
    except No:  # It is told of the key itself.
        return None
    here = found is not None and all(Path(file).exists() for file in found.split(", "))
    return find(found, "train") if found is not None and here else None


def held_out(value: Any, asked: Asked) -> dict[str, int] | None:
    """As many for each look, as verl has it; all of them, where it can be told how many that is."""
    if value is not None and count(value) > 0:
        return {"rows": value, "few": value}
    rows = rows_of(asked["data.val_files"], asked)
    return None if rows is None else {"rows": len(rows), "few": len(rows)}


def every(value: Any, asked: Asked) -> int:
    return max(0, count(value))


def steps(value: Any, asked: Asked) -> int:
    if value is not None:
        return count(value)
    epochs, batch = asked.count("trainer.total_epochs"), asked.count("data.train_batch_size")
    rows = rows_of(asked["data.train_files"], asked)
    if rows is None:
        problem = f"how many steps {epochs} epochs are cannot be told: the data is not on this machine"
        raise No(problem, "write `trainer.total_training_steps=N`")
    if len(rows) < batch:
        raise No(f"{batch} prompts a step are more than the {len(rows)} rows", "write a smaller data.train_batch_size")
    return epochs * (len(rows) // batch)


def warmup(value: Any, asked: Asked) -> int:
    """Theirs are steps of the run, and ours the optimizer's."""
    if value is not None and number(value) >= 0:
        return count(value) * updates(asked)
    ratio = asked.number(f"{OPTIM}.lr_warmup_steps_ratio")
    return int(ratio * steps(asked["trainer.total_training_steps"], asked)) * updates(asked) if ratio else 0


def updates(asked: Asked) -> int:
    return loss.minibatches(None, asked) * loss.epochs(None, asked)


def falls(value: Any, asked: Asked) -> dict[str, Any] | None:
    if value == "constant":
        return None
    if value != "cosine":
        raise No(f"a rate that falls as {value!r}", "write constant or cosine")
    if (cycles := asked.number(f"{OPTIM}.num_cycles")) != 0.5:
        raise No(f"{cycles:g} cycles, on which a rate would rise again", "leave it out", f"{OPTIM}.num_cycles")
    whole, key = steps(asked["trainer.total_training_steps"], asked) * updates(asked), f"{OPTIM}.min_lr_ratio"
    return {"steps": whole, "floor": asked.number(key) if asked[key] is not None else 0.0, "fall": "cosine"}


def tokens(value: Any, asked: Asked) -> int | None:
    """What fits into memory at one time is said in tokens, however rows are cut."""
    if value is not None:
        return count(value)
    rows = asked["actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu"]
    return None if rows is None else count(rows) * (prompt(asked) + response(asked))


def optimizer(value: Any, asked: Asked) -> None:
    if odd := [name for name in value if name not in PLACES]:
        raise No(f"{odd[0]!r} cannot be had here", "leave it out")


def lora(value: Any, asked: Asked) -> dict[str, Any] | None:
    if not value:
        return None
    targets = asked[f"{MODEL}.target_modules"]
    found: dict[str, Any] = {"rank": count(value), "alpha": asked.number(f"{MODEL}.lora_alpha")}
    if targets != "all-linear":
        found["targets"] = [targets] if isinstance(targets, str) else targets
    return found


def report(value: Any, asked: Asked) -> list[str] | None:
    names = [value] if isinstance(value, str) else list(value or ())
    if odd := [name for name in names if name not in (*TELLS, *AT_HAND)]:
        raise No(f"nobody here tells {odd[0]!r}", f"write some of {', '.join((*TELLS, *AT_HAND))}")
    return [name for name in names if name in TELLS] or None


def reward(value: Any, asked: Asked) -> dict[str, Any]:
    """Their function, or the one that verl would choose by the data source."""
    if value:
        file = str(Path(str(value)).expanduser())
        args: dict[str, Any] = {"path": file, "name": asked["custom_reward_function.name"]}
        if kwargs := asked["custom_reward_function.reward_kwargs.*"]:
            args["kwargs"] = kwargs
        return {"custom": {"function": "trainer.verl.reward:custom", "args": args}}
    rows = rows_of(asked["data.train_files"], asked)
    for place in range(min(len(rows), LOOKED_AT) if rows is not None else 0):
        source = rows[place].get("data_source") if rows is not None else None
        if source != SCORED:
            problem = f"the rows are of {source!r}, whose rule does not come with mtrl"
            raise No(problem, "name a function of yours: `custom_reward_function.path=rewards.py`")
    return {"score": {"function": "trainer.verl.reward:by_source"}}


def manager(value: Any, asked: Asked) -> None:
    if value not in ("naive", "dapo", "prime"):
        problem = f"the reward manager {value!r} asks otherwise than one answer at a time"
        raise No(problem, "define `compute_score(data_source, solution_str, ground_truth, extra_info)` and write naive")
