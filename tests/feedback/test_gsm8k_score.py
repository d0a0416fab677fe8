"""Tests of the GSM8K score: numbers in different notations are equal."""

from __future__ import annotations

import pytest

from gateway.feedback.gsm8k import Gsm8kInteraction, compute_score, extract_solution


@pytest.mark.parametrize(
    ("text", "truth"),
    [
        ("#### 1,000.0", "1000"),
        ("#### -5", "-5"),
        ("#### \u22125", -5),
        ("#### +5", 5),
        ("#### $18", "18"),
        ("#### -$18.50.", "-18.5"),
        ("#### 72.", "72"),
        ("#### .5", 0.5),
        ("#### 3 then #### 4", "4"),
        ("#### 72" + " so it goes" * 100, "72"),
        ("#### 1000", "$1,000"),
    ],
)
def test_strict_reads_signs_separators_currency_and_full_stops(text: str, truth: str | float) -> None:
    assert compute_score(text, truth, score=2.0) == 2.0
    assert compute_score(text, "71", format_score=0.1) == compute_score(text, "x = 4", format_score=0.1) == 0.1
    assert compute_score(text.replace("####", "is"), truth, format_score=0.1) == 0.0


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("it costs $1,250.75, all told.", "1250.75"),
        ("so the answer is 72.", "72"),
        ("10-7=3", "3"),
        ("5-3", "3"),
        ("between 2 and -4", "-4"),
        ("42 ... and that is it.", "42"),
        ("see 8, version 1.2.3", "8"),
        ("none at all.", None),
    ],
)
def test_flexible_skips_what_is_no_number(text: str, answer: str | None) -> None:
    assert extract_solution(text, "flexible") == answer


async def test_the_truth_may_be_the_datasets_whole_solution() -> None:
    judge = Gsm8kInteraction({})
    instance = await judge.start_interaction(ground_truth="16 - 3 - 4 = 9 eggs, and 9 * 2 = 18.\n#### 18")
    assert (await judge.generate_response(instance, [{"role": "assistant", "content": "#### 18"}]))[0] is True
    assert (await judge.generate_response(instance, [{"role": "assistant", "content": "#### 16"}]))[0] is False
