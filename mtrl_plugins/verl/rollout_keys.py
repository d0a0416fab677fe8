"""Converts verl's keys for turns, token limits, tools, sampling and serving."""

from __future__ import annotations

from typing import Any

from mtrl_plugins.verl.key_rule import SourceConfig, UnsupportedValue, parse_count, parse_number
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


def history(value: Any, config: SourceConfig) -> str:
    """How earlier turns are rendered."""
    return "inference_template" if value else "full"


def temperature(value: Any, config: SourceConfig) -> float:
    """The sampling temperature, which must not be 0."""
    if config[f"{ROLLOUT}.do_sample"] is False or not parse_number(value):
        raise UnsupportedValue(
            "without sampling there is nothing to learn from", "set do_sample, and a temperature above 0"
        )
    return parse_number(value)


def top_k(value: Any, config: SourceConfig) -> int:
    """The number of most likely tokens to sample from; 0 for no limit."""
    return max(0, parse_count(value))


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
