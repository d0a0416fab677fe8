"""An answer is right when it is the same number, however it is written.

The names and the two methods are those of verl's GSM8K reward. The whole text is read, since the patterns here
are linear in its length, and numbers are compared as numbers: `1,000.0` is `1000`.
"""

from __future__ import annotations

import re
from decimal import Decimal, InvalidOperation
from typing import Literal

Method = Literal["strict", "flexible"]

_SIGN, _MONEY = "[-+\u2212]?", "[$\u20ac\u00a3\u00a5]?"
_NUMBER = f"{_SIGN}{_MONEY}{_SIGN}[0-9.,]+"
_STRICT = re.compile(f"#### ({_NUMBER})")
# A sign right after a digit or a bracket is an operator: the last number of `5-3` is 3.
_FLEXIBLE = re.compile(rf"(?:(?<![0-9.,)\]])({_NUMBER}))|([0-9.,]+)")
_UNWRITTEN = str.maketrans({",": None, "$": None, "\u20ac": None, "\u00a3": None, "\u00a5": None, "\u2212": "-"})


def extract_solution(solution_str: str, method: Method = "strict") -> str | None:
    """The number that a text gives as its answer, without separators; None where it gives none.

    `strict` wants `#### n` and takes the last one; `flexible` takes the last number of the text.
    """
    if method == "strict":
        found = [match[1] for match in _STRICT.finditer(solution_str)]
    elif method == "flexible":
        found = [match[0] for match in _FLEXIBLE.finditer(solution_str)]
    else:
        raise ValueError(f"method is {method!r}; it is 'strict' or 'flexible'")
    if method == "strict":
        found = found[-1:]
    return next((text for raw in reversed(found) if number(text := _written_plainly(raw)) is not None), None)


def compute_score(
    solution_str: str,
    ground_truth: str | int | float,
    method: Method = "strict",
    format_score: float = 0.0,
    score: float = 1.0,
) -> float:
    """`score` for the right number, `format_score` for another one, nothing where there is none."""
    answer = extract_solution(solution_str, method)
    if answer is None:
        return 0.0
    truth = _written_plainly(str(ground_truth).strip())
    expected = number(truth)
    right = answer == truth if expected is None else number(answer) == expected
    return score if right else format_score


def number(text: str) -> Decimal | None:
    try:
        value = Decimal(text)
    except InvalidOperation:
        return None
    return value if value.is_finite() else None


def _written_plainly(text: str) -> str:
    """Without separators, currency, and the full stop of a sentence that ends in the number."""
    return text.translate(_UNWRITTEN).removesuffix(".")
