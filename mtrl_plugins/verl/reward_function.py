"""Calls reward functions written for verl with verl's arguments.

`solution_str` is the whole response, as verl decodes it: the policy's text with its calls, and what tools and users
answered, without special tokens. `extra_info` has the ids and the mask beside it, and the policy's text alone.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping
from functools import lru_cache
from typing import Any

from mtrl_plugins.verl.registry import default_compute_score
from trainer.ledger import Author
from trainer.load_plugin import load_plugin
from trainer.reward.attempt import Attempt

Score = Callable[..., Any]


def custom(
    attempt: Attempt, path: str, name: str = "compute_score", kwargs: Mapping[str, Any] | None = None
) -> float | Awaitable[float]:
    """The score of a user's function, sync or async; if it returns a mapping, its `score`."""
    result = _load_function(f"{path}:{name}")(**score_arguments(attempt), **(kwargs or {}))
    return _await_score(result) if inspect.isawaitable(result) else _to_score(result)


async def _await_score(result: Awaitable[Any]) -> float:
    return _to_score(await result)


def by_source(attempt: Attempt) -> float:
    """The score of verl's default function for the row's `data_source`."""
    return _to_score(default_compute_score(**score_arguments(attempt)))


def score_arguments(attempt: Attempt) -> dict[str, Any]:
    """The keyword arguments of verl's reward functions."""
    columns = attempt.columns
    ids, mask = attempt.response_ids
    scores = {
        "turn_scores": [score for score in attempt.turn_scores if score is not None],
        "tool_rewards": [reward for reward in attempt.tool_rewards if reward is not None],
    }
    extra = dict(columns.get("extra_info") or {})
    ledgers = attempt.rollout.ledgers
    answers = sum(entry.author in (Author.TOOL, Author.FEEDBACK) for ledger in ledgers for entry in ledger)
    extra |= {
        "num_turns": 1 + len(attempt.turns) + answers,
        "rollout_reward_scores": scores,
        "policy_str": attempt.text,
        "response_ids": ids,
        "response_mask": mask,
    }
    return {
        "data_source": columns.get("data_source", ""),
        "solution_str": attempt.response,
        "ground_truth": attempt.truth,
        "extra_info": extra,
    }


@lru_cache
def _load_function(name: str) -> Score:
    function: Score = load_plugin(name, "reward.components.custom.args.path")
    return function


def _to_score(value: Any) -> float:
    return float(value["score"] if isinstance(value, Mapping) else value)
