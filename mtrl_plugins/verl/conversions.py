"""Converts values of verl's configuration; `keys.yaml` names the function of each key."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gateway.feedback.base import plain_text
from gateway.plural import format_count
from mtrl_plugins.scripts import conversions as shared
from mtrl_plugins.scripts.conversions import file_list, load_rows
from mtrl_plugins.scripts.key_table import KeyTable, SourceConfig, UnsupportedValue, parse_count, parse_number
from trainer.parse.choose import PARSERS as PARSERS

ROLLOUT = "actor_rollout_ref.rollout"
MULTI_TURN = f"{ROLLOUT}.multi_turn"
TOOLS, INTERACTION = f"{MULTI_TURN}.tool_config_path", f"{MULTI_TURN}.interaction_config_path"
AGENT_LOOP = f"{ROLLOUT}.agent.default_agent_loop"
SIDES = {"left": "right", "right": "left", "middle": "middle"}
"""verl 0.7 names the side to keep, `result_limit.side` the side to remove."""


def max_response_tokens(config: SourceConfig) -> int:
    """The token limit of a response."""
    return config.count("data.max_response_length")


def max_prompt_tokens(config: SourceConfig) -> int:
    """The token limit of a prompt."""
    return config.count("data.max_prompt_length")


def rollout_tokens(value: Any, config: SourceConfig) -> int:
    """The token limit of a whole rollout."""
    total = max_prompt_tokens(config) + max_response_tokens(config)
    model_limit = config[f"{ROLLOUT}.max_model_len"]
    return total if model_limit is None else min(total, parse_count(model_limit))


def turn_tokens(value: Any, config: SourceConfig) -> int:
    """The token limit of one turn."""
    return max_response_tokens(config)


def is_multi_turn(config: SourceConfig) -> bool:
    """True if there are several turns: enabled, or implied by tools or an interaction.

    verl's default agent loop has a single turn, but it counts only if it is written, since rows may name another.
    """
    enabled = config[f"{MULTI_TURN}.enable"]
    has_tools = bool(config[TOOLS] or config[INTERACTION])
    if enabled is False and has_tools and config.has(f"{MULTI_TURN}.enable"):
        raise UnsupportedValue(
            "is off, but tools or an interaction are named", "turn it on, or remove them", f"{MULTI_TURN}.enable"
        )
    is_single = config.has(AGENT_LOOP) and config[AGENT_LOOP] == "single_turn_agent"
    if is_single and has_tools:
        problem = "is single_turn_agent, which has no tools, but tools or an interaction are named"
        raise UnsupportedValue(problem, "write tool_agent, or remove them", AGENT_LOOP)
    return not is_single and (bool(enabled) or has_tools)


def assistant_turns(value: Any, config: SourceConfig) -> int:
    """The limit of assistant turns, at most one per token; verl's limit of user turns also counts rounds of tools."""
    if not is_multi_turn(config):
        return 1
    limits = [max_response_tokens(config)]
    if (limit := config[f"{MULTI_TURN}.max_assistant_turns"]) is not None:
        limits.append(parse_count(limit))
    if (user_limit := config[f"{MULTI_TURN}.max_user_turns"]) is not None:
        limits.append(parse_count(user_limit) + 1)
    return min(limits)


def user_turns(value: Any, config: SourceConfig) -> int:
    """The limit of user turns."""
    if not is_multi_turn(config):
        return 0
    limit = config[f"{MULTI_TURN}.max_user_turns"]
    return assistant_turns(None, config) if limit is None else parse_count(limit)


def call_limits(value: Any, config: SourceConfig) -> dict[str, int]:
    """The calls of a turn that verl would execute, and at least as many in a rollout."""
    calls = parse_count(value)
    limits = {"tool_calls": max(32, calls * assistant_turns(None, config))}
    return limits | {"parallel_calls": calls} if is_multi_turn(config) and calls else limits


def tool_files(value: Any, config: SourceConfig) -> list[str]:
    """The files that configure tools and interactions."""
    return [str(file) for file in (config[TOOLS], config[INTERACTION]) if file]


def result_limit(value: Any, config: SourceConfig) -> dict[str, Any] | None:
    """The limit of a tool result's length."""
    if not config[TOOLS]:
        return None
    key = f"{MULTI_TURN}.tool_response_truncate_side"
    side = config[key]
    if side not in SIDES:
        raise UnsupportedValue(f"unknown side {side!r}", f"write one of {', '.join(SIDES)}", key)
    return {"chars": parse_count(value), "side": SIDES[side]}


def parser(value: Any, config: SourceConfig) -> str | None:
    """The parser of tool calls, if there are tools."""
    if not config[TOOLS]:
        return None
    if value not in PARSERS:
        raise UnsupportedValue(
            f"unknown parser {value!r}", f"write one of {', '.join(PARSERS)}, or a class as `module:Class`"
        )
    return str(value)


def temperature(value: Any, config: SourceConfig) -> float:
    """The sampling temperature, which must not be 0."""
    if config[f"{ROLLOUT}.do_sample"] is False or not parse_number(value):
        raise UnsupportedValue(
            "without sampling there is nothing to learn from", "set do_sample, and a temperature above 0"
        )
    return parse_number(value)


def serving_options(value: Any, config: SourceConfig) -> list[str] | None:
    """SGLang's command-line options."""
    sizes = {
        "tp-size": config[f"{ROLLOUT}.tensor_model_parallel_size"],
        "dp-size": config[f"{ROLLOUT}.data_parallel_size"],
    }
    sizes["mem-fraction-static"] = config[f"{ROLLOUT}.gpu_memory_utilization"]
    options = {name: value for name, value in sizes.items() if value not in (None, 1)}
    options |= {name.replace("_", "-"): value for name, value in config[f"{ROLLOUT}.engine_kwargs.sglang.*"].items()}
    words: list[str] = []
    for name, value in options.items():
        if value in (None, False):
            continue
        words += [f"--{name}"] if value is True else [f"--{name}", str(value)]
    return words or None


ACTOR = "actor_rollout_ref.actor"
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
AGGREGATES: dict[str, str | int] = {
    "token-mean": "token",
    "seq-mean-token-mean": "sequence",
    "seq-mean-token-sum": 1,
    "seq-mean-token-sum-norm": 1,
}


def algorithm_name(value: Any, config: SourceConfig) -> str:
    """The algorithm for verl's advantage estimator and loss mode."""
    if value not in ESTIMATORS:
        raise UnsupportedValue(f"unknown estimator {value!r}", f"write one of {', '.join(ESTIMATORS)}")
    algorithm = ESTIMATORS[value]
    if algorithm == "grpo" and config["algorithm.norm_adv_by_std_in_grpo"] is False:
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


def group_size(value: Any, config: SourceConfig) -> int:
    """Rollouts of a task. With one, verl takes the score itself for grpo's advantage; here it would be 0."""
    estimator = config["algorithm.adv_estimator"]
    if parse_count(value) == 1 and ESTIMATORS.get(estimator, "reinforce_pp") != "reinforce_pp":
        problem = f"{estimator} compares the rollouts of a prompt with each other, so with 1 nothing would be learned"
        raise UnsupportedValue(problem, f"write `{ROLLOUT}.n=8`, or `algorithm.adv_estimator=reinforce_plus_plus`")
    return parse_count(value)


def credit(value: Any, config: SourceConfig) -> dict[str, Any] | None:
    """The credit settings: GAE with its discount and lambda, or none."""
    estimator = config["algorithm.adv_estimator"]
    discount, trust = config.number("algorithm.gamma"), config.number("algorithm.lam")
    if estimator == "gae":
        return {"kind": "gae", "gamma": discount, "lam": trust}
    if estimator == "reinforce_plus_plus" and discount != 1:
        raise UnsupportedValue(
            "a discount per token needs a critic (gae)", "write `algorithm.gamma=1.0`", "algorithm.gamma"
        )
    return None


def critic(value: Any, config: SourceConfig) -> dict[str, Any] | None:
    """The critic's settings, if the estimator is gae."""
    return {"lr": parse_number(value)} if config["algorithm.adv_estimator"] == "gae" else None


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


def aggregate(value: Any, config: SourceConfig) -> str | float:
    """The aggregation, or the constant that token sums are divided by; in verl, gspo always has its own."""
    if value not in AGGREGATES:
        raise UnsupportedValue(f"unknown aggregation {value!r}", f"write one of {', '.join(AGGREGATES)}")
    if config[LOSS_MODE] == "gspo":
        return "sequence"
    if value == "seq-mean-token-sum-norm":
        constant = parse_count(config[f"{ACTOR}.loss_scale_factor"] or max_response_tokens(config))
        rows = None if config[f"{ACTOR}.use_dynamic_bsz"] else config[f"{ACTOR}.ppo_micro_batch_size_per_gpu"]
        return constant / parse_count(rows) if rows else constant  # verl sums over a micro-batch, and takes no mean.
    aggregation: str | int = AGGREGATES[value]
    return aggregation


def count_untrained(value: Any, config: SourceConfig) -> bool | None:
    """Whether rows without a trained token count: where verl divides by a constant alone."""
    return True if config[f"{ACTOR}.loss_agg_mode"] == "seq-mean-token-sum-norm" else None


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
    importance = {"importance": "none"} if KL_ESTIMATORS[kind].endswith("+") else {}
    return {"coefficient": coefficient, "estimator": KL_ESTIMATORS[kind], "in_reward": in_reward, **importance}


CORRECTION = "algorithm.rollout_correction"


def mismatch(value: Any, config: SourceConfig) -> dict[str, Any]:
    """The correction of the mismatch between engine and trainer: truncated weights, rejection, both or neither."""
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
        settings |= {"reject": level, "bounds": [config.number(low) if config.has(low) else 1 / high, high]}
    return settings or {"truncate": "never"}


def overlong(value: Any, config: SourceConfig) -> dict[str, Any] | None:
    """The penalty for responses that are nearly too long."""
    buffer = "reward_model.overlong_buffer"
    if not value:
        return None
    penalty = config.number(f"{buffer}.penalty_factor")
    return {"limit": max_response_tokens(config), "buffer": config.count(f"{buffer}.len"), "penalty": penalty}


MODEL = "actor_rollout_ref.model"
OPTIM = "actor_rollout_ref.actor.optim"
RECIPES = {"dapo": None, "transfer_queue": None, "one_step_off_policy": "one_step_off"}
"""verl's recipes that train as its own program does, and the mode that each is."""
KNOWN_SOURCE = "openai/gsm8k"
POSITIONS = "max_position_embeddings"
DROPOUT_OPTIONS = ("attention_dropout", "embd_pdrop", "resid_pdrop", "attn_pdrop", "hidden_dropout")
OFFLOAD_OPTIONS = (
    "optimizer_offload_fraction",
    "overlap_cpu_optimizer_d2h_h2d",
    "use_precision_aware_optimizer",
    "optimizer_cpu_offload",
)
"""Optimizer options that only choose where its state is kept."""
MAX_CHECKED_ROWS = 10_000
"""Rows whose `data_source` is checked when the configuration is translated."""


def train_files(value: Any, config: SourceConfig) -> str:
    """Paths of the training data, which have to be given."""
    paths = file_list(value, config)
    if paths is None:
        raise UnsupportedValue("is missing", "write the path of a file")
    return paths


def evaluation_rows(value: Any, config: SourceConfig) -> dict[str, int] | None:
    """The same number of rows for each evaluation; all rows if their number is known."""
    if value is not None and parse_count(value) > 0:
        return {"rows": value, "final_rows": value}
    rows = load_rows(config["data.val_files"], config)
    return None if rows is None else {"rows": len(rows), "final_rows": len(rows)}


def evaluation_every(value: Any, config: SourceConfig) -> int:
    """The steps between evaluations; 0 for none."""
    return 0 if value is False else max(0, parse_count(value))


def steps(value: Any, config: SourceConfig) -> int:
    """The number of steps, computed from epochs and rows if it is not given."""
    if value is not None:
        return parse_count(value)
    epochs, batch = config.count("trainer.total_epochs"), config.count("data.train_batch_size")
    rows = load_rows(config["data.train_files"], config)
    if rows is None:
        problem = f"cannot compute the steps of {epochs} epochs: the data is not on this machine"
        raise UnsupportedValue(problem, "write `trainer.total_training_steps=N`", "trainer.total_training_steps")
    if len(rows) < batch:
        raise UnsupportedValue(
            f"{batch} prompts per step are more than the data has ({format_count(len(rows), 'row')})",
            "write a smaller data.train_batch_size",
            "data.train_batch_size",
        )
    return epochs * (len(rows) // batch)


def warmup(value: Any, config: SourceConfig) -> int:
    """Warmup in optimizer updates; verl counts steps of the run."""
    if value is not None and parse_number(value) >= 0:
        return parse_count(value) * updates_per_step(config)
    ratio = config.number(f"{OPTIM}.lr_warmup_steps_ratio")
    return int(ratio * steps(config["trainer.total_training_steps"], config)) * updates_per_step(config) if ratio else 0


def updates_per_step(config: SourceConfig) -> int:
    """The number of optimizer updates in a step of the run."""
    return minibatches(None, config) * epochs(None, config)


def lr_schedule(value: Any, config: SourceConfig) -> dict[str, Any] | None:
    """The decay of the learning rate; None if it is constant."""
    if value == "constant":
        return None
    if value != "cosine":
        raise UnsupportedValue(f"unknown schedule {value!r}", "write constant or cosine")
    if (cycles := config.number(f"{OPTIM}.num_cycles")) != 0.5:
        raise UnsupportedValue(
            f"{cycles:g} cycles are not supported: the rate would rise again", "remove it", f"{OPTIM}.num_cycles"
        )
    total, key = (
        steps(config["trainer.total_training_steps"], config) * updates_per_step(config),
        f"{OPTIM}.min_lr_ratio",
    )
    ratio = config.number(key) if config[key] is not None else 0.0
    return {"lr_scheduler": "cosine", "decay_steps": total, "min_lr_ratio": ratio}


def microbatch_tokens(value: Any, config: SourceConfig) -> int | None:
    """The tokens of a micro-batch; verl may give a number of rows instead."""
    if value is not None:
        return parse_count(value)
    rows = config["actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu"]
    return None if rows is None else parse_count(rows) * (max_prompt_tokens(config) + max_response_tokens(config))


def check_optimizer_options(value: Any, config: SourceConfig) -> None:
    """Rejects optimizer options that change more than where the state is kept."""
    if unknown := [name for name in value if name not in OFFLOAD_OPTIONS]:
        raise UnsupportedValue(f"{unknown[0]!r} is not supported", "remove it")


def lora(value: Any, config: SourceConfig) -> dict[str, Any] | None:
    """The LoRA settings; None if all weights are trained."""
    if not value:
        return None
    targets = config[f"{MODEL}.target_modules"]
    settings: dict[str, Any] = {"rank": parse_count(value), "alpha": config.number(f"{MODEL}.lora_alpha")}
    if targets != "all-linear":
        settings["targets"] = [targets] if isinstance(targets, str) else targets
    return settings


def shared_rows(value: Any, config: SourceConfig) -> int | None:
    """How many ranks share every row: the older key's value if that is more than 1, else the newer one's."""
    older, newer = (f"actor_rollout_ref.actor.{place}ulysses_sequence_parallel_size" for place in ("", "fsdp_config."))
    return shared.context_parallel(older, config) or shared.context_parallel(newer, config)


def mode(value: Any, config: SourceConfig) -> str | None:
    """The mode of one of verl's recipes."""
    if value is not None and value not in RECIPES:
        raise UnsupportedValue(f"the recipe {value!r} is not supported", "use verl.trainer.main_ppo")
    return RECIPES.get(value)


def check_truncation(value: Any, config: SourceConfig) -> None:
    """Rejects the truncation of prompts where one of the rows is too long, as far as rows and model are here."""
    if value == "error" or config["data.filter_overlong_prompts"] is True:
        return
    rows, model = load_rows(config["data.train_files"], config), config[f"{MODEL}.path"]
    folder, limit = Path(str(model)).expanduser(), max_prompt_tokens(config)
    if rows is None or not (folder / "tokenizer.json").is_file():
        return
    from tokenizers import Tokenizer  # only configurations that truncate need it

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    for index in range(min(len(rows), MAX_CHECKED_ROWS)):
        prompt = rows[index].get(config["data.prompt_key"]) or ""
        messages = prompt if isinstance(prompt, list) else [{"content": prompt}]
        text = "\n".join(plain_text(message.get("content")) for message in messages)
        if len(text.encode()) > limit and (tokens := len(tokenizer.encode(text).ids)) > limit:
            problem = f"the prompt of {rows.location(index)} has {tokens} tokens: truncated, it is a different task"
            raise UnsupportedValue(problem, "write `data.truncation=error`, or `data.filter_overlong_prompts=True`")


def check_model_overrides(value: Any, config: SourceConfig) -> None:
    """Rejects changes of a model's configuration, except that there is no dropout, and positions that it has anyway."""
    harmless = {name for name, item in value.items() if name in DROPOUT_OPTIONS and item == 0}
    if (needed := value.get(POSITIONS)) is not None and rollout_tokens(None, config) <= _model_positions(
        config, needed
    ):
        harmless.add(POSITIONS)
    if changed := {name: item for name, item in value.items() if name not in harmless}:
        raise UnsupportedValue(f"{changed} is not supported", "write it into the configuration in the model's folder")


def _model_positions(config: SourceConfig, unknown: Any) -> int:
    """How many positions the model has by its own configuration; `unknown` if it is not on this machine."""
    try:
        file = Path(str(config[f"{MODEL}.path"])).expanduser() / "config.json"
        positions = json.loads(file.read_text(encoding="utf-8")).get(POSITIONS)
    except (OSError, ValueError, AttributeError):
        positions = None
    return parse_count(unknown if positions is None else positions)


def check_lora_targets(value: Any, config: SourceConfig) -> None:
    """Rejects names of modules that only Megatron's models have."""
    names = [value] if isinstance(value, str) else list(value or ())
    if invalid := [name for name in names if str(name).startswith("linear_")]:
        remedy = "write names of the model's own modules, such as [q_proj,v_proj], or all-linear"
        raise UnsupportedValue(f"{invalid[0]!r} is a module of Megatron's models", remedy)


def reward(value: Any, config: SourceConfig) -> dict[str, Any]:
    """The user's reward function, or the one that verl chooses by `data_source`."""
    if value:
        file = str(Path(str(value)).expanduser())
        args: dict[str, Any] = {"path": file, "name": config["custom_reward_function.name"]}
        if kwargs := config["custom_reward_function.reward_kwargs.*"]:
            args["kwargs"] = kwargs
        return {"custom": {"function": "mtrl_plugins.verl.reward_function:custom", "args": args}}
    rows = load_rows(config["data.train_files"], config)
    for index in range(min(len(rows), MAX_CHECKED_ROWS) if rows is not None else 0):
        source = rows[index].get("data_source") if rows is not None else None
        if source != KNOWN_SOURCE:
            problem = f"the rows have the data source {source!r}, which mtrl has no reward function for"
            raise UnsupportedValue(problem, "name your own function: `custom_reward_function.path=rewards.py`")
    return {"score": {"function": "mtrl_plugins.verl.reward_function:by_source"}}


def check_reward_manager(value: Any, config: SourceConfig) -> None:
    """Rejects reward managers that do not score one answer at a time."""
    if value not in ("naive", "dapo", "prime"):
        problem = f"the reward manager {value!r} is not supported; functions score one answer at a time"
        raise UnsupportedValue(
            problem, "define `compute_score(data_source, solution_str, ground_truth, extra_info)` and write naive"
        )


def not_empty(value: Any, config: SourceConfig) -> Any:
    """The value; None if it is empty."""
    return value or None


def dynamic_sampling(value: Any, config: SourceConfig) -> Any:
    """How often groups are drawn again; verl's 0 stands for no limit."""
    batches = config["algorithm.filter_groups.max_num_gen_batches"]
    return bool(value) if not value or batches is None else batches or 100


def save_interval(value: Any, config: SourceConfig) -> int | None:
    """Steps between checkpoints; None lets the run decide."""
    return value if isinstance(value, int) and value > 0 else None


VERL_TABLE = KeyTable.read(Path(__file__).with_name("keys.yaml"), vars(shared) | globals())
