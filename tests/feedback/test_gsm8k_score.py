"""Tests of the GSM8K score: numbers in different notations are equal."""

from __future__ import annotations

from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.feedback.gsm8k import Gsm8kInteraction, compute_score, extract_solution

NUMBERS = st.decimals(allow_nan=False, allow_infinity=False, min_value=-(10**9), max_value=10**9, places=3)
WORDS = st.text(alphabet=st.characters(exclude_characters="0123456789.,#-+\u2212$\u20ac\u00a3\u00a5)]"), max_size=40)


@given(value=NUMBERS, before=WORDS, after=WORDS)
def test_strict_accepts_thousands_separators(value: Decimal, before: str, after: str) -> None:
    assert compute_score(f"{before}#### {value:,} {after}", str(value)) == 1.0


@given(value=NUMBERS, before=WORDS, after=WORDS)
def test_flexible_takes_the_last_number_of_the_text(value: Decimal, before: str, after: str) -> None:
    assert compute_score(f"7 {before} {value:,}{after}", str(value), method="flexible") == 1.0


@given(value=NUMBERS, other=NUMBERS)
def test_answers_are_equal_if_their_numbers_are(value: Decimal, other: Decimal) -> None:
    assert compute_score(f"#### {value}", str(other)) == float(value == other)


@given(text=st.text())
def test_any_text_gives_a_finite_number_or_none(text: str) -> None:
    for method in ("strict", "flexible"):
        solution = extract_solution(text, method)
        assert solution is None or Decimal(solution).is_finite()


@given(text=WORDS, value=NUMBERS)
def test_strict_needs_the_marker(text: str, value: Decimal) -> None:
    assert compute_score(f"{text} {value}", str(value), format_score=0.1) == 0.0


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


def test_a_wrong_number_gets_the_format_score() -> None:
    assert compute_score("#### 3", "4", format_score=0.1) == 0.1
    assert compute_score("#### 4", "4", score=2.0) == 2.0


def test_a_number_never_equals_a_truth_that_is_none() -> None:
    assert compute_score("#### 4", "x = 4") == 0.0


def test_an_unknown_method_is_refused() -> None:
    with pytest.raises(ValueError, match="'loose'"):
        extract_solution("#### 4", "loose")  # type: ignore[arg-type]


async def test_the_truth_may_be_the_datasets_whole_solution() -> None:
    judge = Gsm8kInteraction({})
    instance = await judge.start_interaction(ground_truth="16 - 3 - 4 = 9 eggs, and 9 * 2 = 18.\n#### 18")
    assert (await judge.generate_response(instance, [{"role": "assistant", "content": "#### 18"}]))[0] is True
    assert (await judge.generate_response(instance, [{"role": "assistant", "content": "#### 16"}]))[0] is False
