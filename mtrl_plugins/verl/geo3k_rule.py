"""verl's geometry3k rule, built on `mathruler` like verl's own: right answers in a box, and the format around them."""

from __future__ import annotations

import re
from importlib import import_module
from typing import Any

_FORMAT = re.compile(r"<think>.*</think>.*\\boxed\{.*\}.*", re.DOTALL)


def format_reward(predict_str: str) -> float:
    """1 for reasoning followed by a boxed answer."""
    return float(_FORMAT.fullmatch(predict_str) is not None)


def acc_reward(predict_str: str, ground_truth: str, use_boxed: bool = True) -> float:
    """1 if the boxed answer, or the whole text, equals the ground truth in mathematics."""
    grader = _load_grader()
    answer = grader.extract_boxed_content(predict_str) if use_boxed else predict_str
    return float(bool(grader.grade_answer(answer, ground_truth)))


def compute_score(predict_str: str, ground_truth: str, use_boxed: bool = True, format_score: float = 0.1) -> float:
    """The weighted mean of accuracy and format."""
    accuracy = acc_reward(predict_str, ground_truth, use_boxed)
    return (1.0 - format_score) * accuracy + format_score * format_reward(predict_str)


def _load_grader() -> Any:
    try:
        return import_module("mathruler.grader")
    except ImportError as error:
        raise ImportError("geometry3k is scored by mathruler: run `pip install 'mtrl-rl[math]'`") from error
