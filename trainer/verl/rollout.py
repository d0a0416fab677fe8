"""Turns, tokens, tools: what verl says with a few keys that bear on each other."""

from __future__ import annotations

from typing import Any

from trainer.parse.choose import NAMES as PARSERS
from trainer.verl.row import Asked, No, count, number

AT = "actor_rollout_ref.rollout"
TURNS = f"{AT}.multi_turn"
TOOLS, INTERACTION = f"{TURNS}.tool_config_path", f"{TURNS}.interaction_config_path"
LOOP = f"{AT}.agent.default_agent_loop"
SIDES = {"left": "right", "right": "left", "middle": "middle"}
"""In 0.7 the side named is the one that is kept; here it is the one that is cut away."""


def response(asked: Asked) -> int:
    return asked.count("data.max_response_length")


def prompt(asked: Asked) -> int:
    return asked.count("data.max_prompt_length")


def rollout_tokens(value: Any, asked: Asked) -> int:
    whole = prompt(asked) + response(asked)
    most = asked[f"{AT}.max_model_len"]
    return whole if most is None else min(whole, count(most))


def turn_tokens(value: Any, asked: Asked) -> int:
    return response(asked)


def many(asked: Asked) -> bool:
    """Whether there is more than one turn: asked for, or else meant by naming tools or an interaction.

    The loop that is there by default has neither, but that is no word of whoever left it out: rows may name theirs.
    """
    enabled = asked[f"{TURNS}.enable"]
    named = bool(asked[TOOLS] or asked[INTERACTION])
    if enabled is False and named and asked.has(f"{TURNS}.enable"):
        raise No("is off, but tools or an interaction are named", "turn it on, or take them out", f"{TURNS}.enable")
    single = asked.has(LOOP) and asked[LOOP] == "single_turn_agent"
    if single and named:
        problem = "is single_turn_agent, which has no tools, but tools or an interaction are named"
        raise No(problem, "write tool_agent, or take them out", LOOP)
    return not single and (bool(enabled) or named)


def assistant_turns(value: Any, asked: Asked) -> int:
    """Without a limit, as many as there can be tokens. There, a limit of user turns also counts rounds of tools."""
    if not many(asked):
        return 1
    limits = [response(asked)]
    if (most := asked[f"{TURNS}.max_assistant_turns"]) is not None:
        limits.append(count(most))
    if (users := asked[f"{TURNS}.max_user_turns"]) is not None:
        limits.append(count(users) + 1)
    return min(limits)


def user_turns(value: Any, asked: Asked) -> int:
    if not many(asked):
        return 0
    users = asked[f"{TURNS}.max_user_turns"]
    return assistant_turns(None, asked) if users is None else count(users)


def tool_calls(value: Any, asked: Asked) -> int:
    """Never fewer than verl would have carried out."""
    return max(32, count(value) * assistant_turns(None, asked))


def tool_files(value: Any, asked: Asked) -> list[str]:
    return [str(file) for file in (asked[TOOLS], asked[INTERACTION]) if file]


def result_limit(value: Any, asked: Asked) -> dict[str, Any] | None:
    if not asked[TOOLS]:
        return None
    key = f"{TURNS}.tool_response_truncate_side"
    side = asked[key]
    if side not in SIDES:
        raise No(f"the side is {side!r}", f"write one of {', '.join(SIDES)}", key)
    return {"chars": count(value), "side": SIDES[side]}


def parser(value: Any, asked: Asked) -> str | None:
    if not asked[TOOLS]:
        return None
    if value not in PARSERS:
        raise No(f"there is no parser {value!r}", f"write one of {', '.join(PARSERS)}, or a class as `module:Class`")
    return str(value)


def history(value: Any, asked: Asked) -> str:
    return "inference_template" if value else "full"


def temperature(value: Any, asked: Asked) -> float:
    if asked[f"{AT}.do_sample"] is False or not number(value):
        raise No("what is always sampled alike cannot be learned from", "write a temperature above 0, and sample")
    return number(value)


def top_k(value: Any, asked: Asked) -> int:
    return max(0, count(value))


def serving(value: Any, asked: Asked) -> list[str] | None:
    """SGLang's own words for what was said of it."""
    said = {"tp-size": asked[f"{AT}.tensor_model_parallel_size"], "dp-size": asked[f"{AT}.data_parallel_size"]}
    said["mem-fraction-static"] = asked[f"{AT}.gpu_memory_utilization"]
    options = {name: value for name, value in said.items() if value not in (None, 1)}
    options |= {name.replace("_", "-"): value for name, value in asked[f"{AT}.engine_kwargs.sglang.*"].items()}
    words: list[str] = []
    for name, value in options.items():
        if value in (None, False):
            continue
        words += [f"--{name}"] if value is True else [f"--{name}", str(value)]
    return words or None
