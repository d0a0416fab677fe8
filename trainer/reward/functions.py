"""Built-in reward functions: answer checks, tool and feedback scores, efficiency and call quality."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import fsum
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from gateway.feedback.gsm8k import Method, compute_score, extract_solution
from gateway.types import Outcome
from trainer.ledger import Author
from trainer.reward.attempt import Attempt
from trainer.rollout.task import Task

Cost = Annotated[float, Field(ge=0, allow_inf_nan=False)]


NO_TRUTH = "the task has no right answer; give its row a `ground_truth`, or use another function"
NO_END_STATE = "the row has no `end_state`; write one, {server: hash or folder}"
NO_NUMBER = "the task's right answer is not a number; use `exact`, or your own function, to compare texts"


def answer(attempt: Attempt, method: Method = "strict") -> float:
    """1 if the policy's last turn gives the right number: as `#### n`, or with `flexible`, as its last number."""
    if problem := find_truth_problem("answer", attempt.task):
        raise ValueError(problem)
    truth = extract_solution(str(attempt.truth)) or str(attempt.truth)
    return compute_score(attempt.answer, truth, method)


def exact(attempt: Attempt) -> float:
    """1 if the policy's last turn ends with `####` and the right answer, ignoring case and spaces."""
    if problem := find_truth_problem("exact", attempt.task):
        raise ValueError(problem)
    _, marker, final = attempt.answer.rpartition("####")
    return float(bool(marker) and _normalize(final) == _normalize(str(attempt.truth)))


def state_equals(attempt: Attempt, ignore: Sequence[str] = ()) -> float:
    """1 if the policy ended and left each state as the row's `end_state` has it: a hash, or a folder beside the data.

    `ignore` are patterns of files in such a folder that do not count.
    """
    if problem := find_truth_problem("state_equals", attempt.task):
        raise ValueError(problem)
    expected: Mapping[str, Any] = attempt.columns["end_state"]
    return float(attempt.ended and all(_has_state(attempt, *item, ignore) for item in expected.items() if item[1]))


def solved(attempt: Attempt) -> float:
    """1 if all that the row asks for is so: the states of its `end_state`, and as last words `####` and its answer.

    Rows made by `mtrl-train make-tasks` have one of the two, or both.
    """
    if problem := find_truth_problem("solved", attempt.task):
        raise ValueError(problem)
    has_state = _has_end_state(attempt.task)
    return float((not has_state or state_equals(attempt)) and (attempt.truth is None or exact(attempt)))


def _has_state(attempt: Attempt, name: str, expected: str, ignore: Sequence[str]) -> bool:
    if name not in attempt.states:
        known = ", ".join(attempt.states) or "none"
        raise ValueError(f"the row's `end_state` names {name!r}; rollouts leave the states of: {known}")
    from gateway.state.state_hash import has_hash_form, hash_state  # only rewards for states need it

    if has_hash_form(expected):
        return attempt.states[name] == expected
    folder = Path(attempt.task.location.rpartition(":")[0]).parent / expected
    if not folder.is_dir():
        raise ValueError(f"the row's `end_state` is neither a hash nor a folder: {expected!r}")
    return attempt.states[name] == hash_state(folder, ignore)


def outcome(attempt: Attempt, method: Method = "strict") -> float:
    """The feedback's score if the task has an interaction, else `answer`; 0 if a limit ended the rollout."""
    if not attempt.ended:
        return 0.0
    return feedback(attempt) if attempt.task.has_feedback else answer(attempt, method)


def tools(attempt: Attempt) -> float:
    """The sum of the scores that tools returned with their answers."""
    return fsum(attempt.given(Author.TOOL))


def feedback(attempt: Attempt) -> float:
    """The sum of the scores that the interaction gave to the policy's turns."""
    return fsum(attempt.given(Author.FEEDBACK))


def calc_reward(attempt: Attempt) -> float:
    """The sum of what the tools' `calc_reward` returned at the end."""
    return attempt.rewards.get("end", 0.0)


def agent(attempt: Attempt) -> float:
    """What the agent that played the rollout gave it: the reward that it posted or returned."""
    if "agent" not in attempt.rewards:
        raise ValueError("the agent gave no reward: return a number from its function, or post one to the session")
    return attempt.rewards["agent"]


def efficiency(
    attempt: Attempt,
    per_call: Cost = 0.05,
    per_turn: Cost = 0.0,
    per_token: Cost = 0.0,
    most: Cost = 1.0,
    always: bool = False,
) -> float:
    """The cost of the policy's calls, turns and tokens, as a negative number, at least `-most`.

    Failed attempts cost nothing unless `always`: if success is rare, the policy would learn not to try.
    """
    if not (attempt.success or always):
        return 0.0
    turns = attempt.turns
    calls, tokens = sum(len(turn.calls) for turn in turns), sum(len(turn.ids) for turn in turns)
    return 0.0 - min(most, per_call * calls + per_turn * len(turns) + per_token * tokens)


def tool_quality(attempt: Attempt, invalid: Cost = 1.0) -> float:
    """The share of calls that succeeded, minus `invalid` times the share of invalid calls; 0 without calls.

    A tool's refusal counts as a call that is neither successful nor invalid.
    """
    entries = [entry for ledger in attempt.rollout.ledgers for entry in ledger if entry.author is Author.TOOL]
    outcomes = [result for entry in entries for result in entry.outcomes if not result.is_infrastructure]
    if not outcomes:
        return 0.0
    return (outcomes.count(Outcome.OK) - invalid * outcomes.count(Outcome.INVALID)) / len(outcomes)


def find_truth_problem(function: str, task: Task) -> str | None:
    """Why a built-in function that compares with the right answer cannot score a task; None if it can."""
    if function == "state_equals":
        return None if _has_end_state(task) else NO_END_STATE
    if function == "solved":
        return None if _has_end_state(task) or task.truth is not None else f"{NO_TRUTH}; or an `end_state`"
    compares = function in ("answer", "exact") or (function == "outcome" and not task.has_feedback)
    if not compares:
        return None
    if task.truth is None:
        return NO_TRUTH
    truth = extract_solution(str(task.truth)) or str(task.truth)
    return NO_NUMBER if function != "exact" and compute_score(f"#### {truth}", truth) != 1.0 else None


def _has_end_state(task: Task) -> bool:
    return isinstance(task.columns.get("end_state"), Mapping)


def _normalize(text: str) -> str:
    return " ".join(text.split()).casefold()


BUILTIN_FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (
        answer,
        exact,
        state_equals,
        solved,
        outcome,
        tools,
        feedback,
        calc_reward,
        agent,
        efficiency,
        tool_quality,
    )
}
TURN_SCORE_AUTHORS: Mapping[str, Author] = {
    "tools": Author.TOOL,
    "feedback": Author.FEEDBACK,
    "outcome": Author.FEEDBACK,
}
"""The functions that sum scores of single turns, and who gave these scores."""
