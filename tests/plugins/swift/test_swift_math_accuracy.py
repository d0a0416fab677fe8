"""Tests of ms-swift's reward `accuracy`: its values are those of ms-swift 4, and no answer can hold the run."""

from __future__ import annotations

import time

import psutil
import pytest

from mtrl_plugins.swift import math_accuracy
from mtrl_plugins.swift.math_accuracy import AnswerComparer


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
    process = comparer._process
    assert process is not None
    del comparer
    assert not psutil.pid_exists(process.pid), "it ends with the function that uses it"


def test_process_that_cannot_compare_is_an_error_and_no_reward(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(math_accuracy, "WORKER", ("-c", "raise SystemExit"))
    with pytest.raises(RuntimeError, match="does not work"):
        AnswerComparer().compare(r"\boxed{7}", "7")
