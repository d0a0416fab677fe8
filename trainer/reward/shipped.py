"""Reward functions that most tasks need: a sum over a ledger, or a comparison with the truth, and nothing slow."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import fsum
from typing import Annotated, Any

from pydantic import Field

from gateway.feedback.score import Method, compute_score, extract_solution
from gateway.types import Outcome
from trainer.ledger import Author
from trainer.reward.attempt import Attempt

Cost = Annotated[float, Field(ge=0, allow_inf_nan=False)]


def answer(attempt: Attempt, method: Method = "strict") -> float:
    """1 where the policy's last turn gives the right number: as `#### n`, or `flexible`, as its last number."""
    if attempt.truth is None:
        raise ValueError("the task has no right answer; give its row a `ground_truth`, or name another function")
    truth = extract_solution(str(attempt.truth)) or str(attempt.truth)
    if compute_score(f"#### {truth}", truth) != 1.0:
        raise ValueError("the task's right answer is no number; name a function of your own, which compares texts")
    return compute_score(attempt.answer, truth, method)


def exact(attempt: Attempt) -> float:
    """1 where the policy's last turn ends with `####` and the row's right answer, but for case and spaces."""
    if attempt.truth is None:
        raise ValueError("the task has no right answer; give its row a `ground_truth`, or name another function")
    _, marked, said = attempt.answer.rpartition("####")
    return float(bool(marked) and _plain(said) == _plain(str(attempt.truth)))


def outcome(attempt: Attempt, method: Method = "strict") -> float:
    """What feedback scored where the task has an interaction, else `answer`; 0 where a limit ended the rollout."""
    if not attempt.ended:
        return 0.0
    return feedback(attempt) if attempt.task.has_feedback else answer(attempt, method)


def tools(attempt: Attempt) -> float:
    """What tools gave while it went on, summed over its turns."""
    return fsum(attempt.given(Author.TOOL))


def feedback(attempt: Attempt) -> float:
    """What an interaction scored, summed over the turns that it answered."""
    return fsum(attempt.given(Author.FEEDBACK))


def calc_reward(attempt: Attempt) -> float:
    """What tools gave at the end, when `calc_reward` was asked of them."""
    return attempt.rewards.get("end", 0.0)


def efficiency(
    attempt: Attempt,
    per_call: Cost = 0.05,
    per_turn: Cost = 0.0,
    per_token: Cost = 0.0,
    most: Cost = 1.0,
    always: bool = False,
) -> float:
    """What calls, turns and tokens of the policy cost, as a number below 0 and never below minus `most`.

    Failures cost nothing unless `always`: where trying costs, and success is rare, the policy learns not to try.
    """
    if not (attempt.success or always):
        return 0.0
    turns = attempt.turns
    calls, tokens = sum(len(turn.calls) for turn in turns), sum(len(turn.ids) for turn in turns)
    return 0.0 - min(most, per_call * calls + per_turn * len(turns) + per_token * tokens)


def tool_quality(attempt: Attempt, invalid: Cost = 1.0) -> float:
    """The share of calls that went well; each that no tool could take costs `invalid` of such a share more.

    A tool that says no is a call that went neither well nor wrong. Without a call it is 0.
    """
    entries = [entry for ledger in attempt.rollout.ledgers for entry in ledger if entry.author is Author.TOOL]
    ends = [end for entry in entries for end in entry.outcomes if not end.infrastructure]
    if not ends:
        return 0.0
    return (ends.count(Outcome.OK) - invalid * ends.count(Outcome.INVALID)) / len(ends)


def _plain(text: str) -> str:
    return " ".join(text.split()).casefold()


SHIPPED: Mapping[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (answer, exact, outcome, tools, feedback, calc_reward, efficiency, tool_quality)
}
SPREAD: Mapping[str, Author] = {"tools": Author.TOOL, "feedback": Author.FEEDBACK, "outcome": Author.FEEDBACK}
"""Functions that sum what single turns were scored, and by whom."""
