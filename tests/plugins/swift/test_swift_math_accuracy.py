"""Tests of ms-swift's reward `accuracy`: its values are those of ms-swift 4, and no answer can hold the run."""

from __future__ import annotations

import time

import psutil
import pytest

from mtrl_plugins.swift import math_accuracy
from mtrl_plugins.swift.math_accuracy import AnswerComparer
from mtrl_plugins.swift.orm import MathAccuracy


@pytest.fixture(scope="module")
def accuracy() -> MathAccuracy:
    return MathAccuracy()


@pytest.mark.parametrize(
    ("text", "solution", "reward"),
    [
        ("random text", "7", 0.0),
        ("7", "7", 0.0),  # Without tags only LaTeX counts.
        ("It is $7$", "7", 0.0),
        (r"final answer is $7$. I hope", "7", 1.0),
        (r"\boxed{7}", "7", 1.0),
        (r"\boxed{7} and \boxed{8}", "7", 0.0),
        (r"\boxed{x=3}", "3", 1.0),
        (r"\boxed{50\%}", "0.5", 1.0),
        (r"\boxed{\frac{1}{2}}", "$0.5$", 1.0),
        ("<answer>7</answer>", "7", 1.0),
        ("<answer>7</answer>", "<answer>7</answer>", 1.0),
        ("<answer>12,000</answer>", "12000", 1.0),
        (r"<answer>\frac{1}{2}</answer>", "0.5", 1.0),
        ("<answer>1/3</answer>", "0.333", 0.0),
        ("<answer>7", "7", 0.0),
        ("#### 7", "7", 0.0),
        ("", "7", 0.0),
        ("7", "no number", 0.0),
    ],
)
def test_accuracy_scores_as_ms_swift_4_does(accuracy: MathAccuracy, text: str, solution: str, reward: float) -> None:
    assert accuracy([text], [solution]) == [reward]


def test_comparison_that_does_not_end_scores_zero_and_its_process_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(math_accuracy, "COMPARE_S", 0.5)
    comparer = AnswerComparer()
    assert comparer.compare(r"\boxed{7}", "7") == 1.0
    process = comparer._process
    assert process is not None
    started = time.monotonic()
    assert comparer.compare(r"\boxed{9^{9^{9^{9}}}}", "1") == 0.0
    assert time.monotonic() - started < 60 and not psutil.pid_exists(process.pid)
    assert comparer.compare(r"\boxed{7}", "7") == 1.0
    comparer.close()


def test_process_that_cannot_compare_is_an_error_and_no_reward(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(math_accuracy, "WORKER", ("-c", "raise SystemExit"))
    with pytest.raises(RuntimeError, match="does not work"):
        AnswerComparer().compare(r"\boxed{7}", "7")


def test_process_ends_with_the_function_that_uses_it() -> None:
    comparer = AnswerComparer()
    comparer.compare("7", "7")
    process = comparer._process
    assert process is not None
    del comparer
    assert not psutil.pid_exists(process.pid)
