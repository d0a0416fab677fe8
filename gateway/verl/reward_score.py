"""A score by the row's data source: the one whose rule is known here, and a refusal by name for the others."""

from __future__ import annotations

from typing import Any

from gateway.feedback.score import compute_score

GSM8K = "openai/gsm8k"


def default_compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None, **kwargs: Any
) -> float:
    """As `compute_score` of the source has it."""
    if data_source != GSM8K:
        raise NotImplementedError(
            f"no reward function for data_source={data_source!r} comes with mtrl, only for {GSM8K!r}; "
            "name one of yours: custom_reward_function.path"
        )
    return float(compute_score(solution_str, ground_truth))
