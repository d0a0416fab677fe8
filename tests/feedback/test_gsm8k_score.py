"""Tests of the GSM8K score: numbers in different notations are equal."""

from __future__ import annotations

from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.feedback.gsm8k import Gsm8kInteraction, compute_score, extract_solution

NUMBERS = st.decimals(allow_nan=False, allow_infinity=False, min_value=-(10**9), max_value=10**9, places=3)


@given(value=NUMBERS, other=NUMBERS)
def test_answers_are_equal_if_their_numbers_are(value: Decimal, other: Decimal) -> None:
    assert compute_score(f"#### {value}", str(other)) == float(value == other)


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
    assert compute_score(text, truth) == 1.0


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
