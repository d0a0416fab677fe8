"""Tests of ms-swift's reward `accuracy`: its values are those of ms-swift 4, and no answer can hold the run."""

from __future__ import annotations

import sys
import time
from importlib.util import module_from_spec, spec_from_file_location
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import pytest

from mtrl_plugins.swift import math_accuracy
from mtrl_plugins.swift.math_accuracy import AnswerComparer
from mtrl_plugins.swift.orm import MathAccuracy


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


FILE = Path(__file__).parents[3] / ".peers" / "swift" / "rewards" / "orm.py"
TEXTS = [
    "random text", "7", "It is $7$.", "#### 7", r"\boxed{7}", r"\boxed{7} and \boxed{8}", r"so \boxed{x=7} it is",
    r"\boxed{\frac{14}{2}}", r"$\frac{1}{2}$", r"\boxed{50\%}", r"\boxed{12,000}", r"\boxed{(1,2)}",
    r"\boxed{7\text{ cm}}",
    "<answer>7</answer>", "<answer>12,000</answer>", r"<answer>\frac{1}{2}</answer>", "<answer>one half</answer>",
    "<answer>7", "<think>8</think><answer>7</answer>", r"<answer>\boxed{7}</answer> \boxed{8}", "",
]  # fmt: skip
SOLUTIONS = ["7", "0.5", "$\\frac{1}{2}$", "12000", "(1,2)", "<answer>7</answer>", "no number"]


@pytest.fixture
def theirs(monkeypatch: pytest.MonkeyPatch) -> Any:
    """ms-swift's class, loaded without ms-swift's dependencies."""
    engine = ModuleType("swift.infer_engine")
    engine.InferRequest = object  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "swift", ModuleType("swift"))
    monkeypatch.setitem(sys.modules, "swift.infer_engine", engine)
    spec = spec_from_file_location("swift_orm", FILE)
    assert spec is not None and spec.loader is not None, f"{FILE} is missing: run `make peers`"
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.MathAccuracy()


def test_accuracy_equals_ms_swifts(theirs: Any) -> None:
    pairs = list(product(TEXTS, SOLUTIONS))
    texts, solutions = [text for text, _ in pairs], [solution for _, solution in pairs]
    expected = dict(zip(pairs, theirs(texts, solutions), strict=True))
    assert dict(zip(pairs, MathAccuracy()(texts, solutions), strict=True)) == expected
    assert {0.0, 1.0} == set(expected.values())
