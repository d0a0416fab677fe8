"""A reward function written for verl is asked as verl asks it, about the policy's own words alone."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping
from functools import lru_cache
from typing import Any

from gateway.feedback.base import plain_text
from gateway.verl.reward_score import default_compute_score
from trainer.ledger import Author
from trainer.plug import plug_in
from trainer.reward.attempt import Attempt

Score = Callable[..., Any]


def custom(
    attempt: Attempt, path: str, name: str = "compute_score", kwargs: Mapping[str, Any] | None = None
) -> float | Awaitable[float]:
    """A function of a file of one's own, async or not; where it gives a mapping, its `score` counts."""
    given = _found(f"{path}:{name}")(**asked(attempt), **(kwargs or {}))
    return _awaited(given) if inspect.isawaitable(given) else _number(given)


async def _awaited(given: Awaitable[Any]) -> float:
    return _number(await given)


def by_source(attempt: Attempt) -> float:
    """As the row's `data_source` has it."""
    return _number(default_compute_score(**asked(attempt)))


def asked(attempt: Attempt) -> dict[str, Any]:
    """What such a function is given by keyword."""
    columns = attempt.columns
    scores = {
        "turn_scores": list(attempt.given(Author.FEEDBACK)),
        "tool_rewards": list(attempt.given(Author.TOOL)),
    }
    extra = dict(columns.get("extra_info") or {})
    answers = sum(entry.author in (Author.TOOL, Author.FEEDBACK) for entry in attempt.ledger)
    extra |= {"num_turns": 1 + len(attempt.turns) + answers, "rollout_reward_scores": scores}
    return {
        "data_source": columns.get("data_source", ""),
        "solution_str": said(attempt),
        "ground_truth": attempt.truth,
        "extra_info": extra,
    }


def said(attempt: Attempt) -> str:
    """All that the policy wrote, turn by turn, its reasoning too, and not a word of what it was answered."""
    texts = []
    for turn in attempt.turns:
        for message in turn.messages:
            thought = message.get("reasoning_content")
            texts += [f"<think>{thought}</think>"] if thought else []
            texts.append(plain_text(message.get("content")))
    return "\n".join(texts)


@lru_cache
def _found(name: str) -> Score:
    function: Score = plug_in(name, "reward.components.custom.args.path")
    return function


def _number(value: Any) -> float:
    return float(value["score"] if isinstance(value, Mapping) else value)
