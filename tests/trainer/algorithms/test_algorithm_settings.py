"""Tests the algorithm settings, and token weights."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from pydantic import ValidationError

from tests.trainer.rollout_strategies import ledgers
from trainer.algorithms.settings import AdaptiveEntropySettings, AlgorithmSettings, MismatchSettings, OverlongSettings
from trainer.algorithms.token_weights import TokenWeightError, compute_token_weights, weigh_all_turns, weigh_last_turn
from trainer.ledger import Author, Entry, Ledger

LEDGER = Ledger(
    (
        Entry(Author.TASK, (1, 2)),
        Entry(Author.POLICY, (3,), logprobs=(-0.1,)),
        Entry(Author.TOOL, (4, 5)),
        Entry(Author.POLICY, (6, 7), logprobs=(-0.1, -0.2)),
    )
)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: AlgorithmSettings(name="ppo"), "name"),
        (lambda: AlgorithmSettings(clip=0.2), "clip"),
        (lambda: MismatchSettings(bounds=(3.0, 2.0)), r"no ratio is within \[3.0, 2.0\]"),
        (lambda: OverlongSettings(limit=10, buffer=20), "buffer of 20 tokens does not lie within a limit of 10"),
        (lambda: AlgorithmSettings(clip_high=math.inf), "clip_high"),
        (lambda: AdaptiveEntropySettings(min=0.3, max=0.2), "no coefficient lies between a `min` of 0.3 and a `max`"),
        (
            lambda: AlgorithmSettings(entropy_coefficient=2.0, adaptive_entropy=AdaptiveEntropySettings()),
            "`entropy_coefficient: 2.0`, is not within `adaptive_entropy`'s 0.0 to 1.0",
        ),
    ],
)
def test_invalid_settings_are_rejected(make: type[AlgorithmSettings], text: str) -> None:
    with pytest.raises(ValidationError, match=text):
        make()


@given(ledger=ledgers())
def test_weights_are_zero_for_tokens_the_policy_did_not_write(ledger: Ledger) -> None:
    assert compute_token_weights(ledger, weigh_all_turns, "t/0") == tuple(map(float, ledger.mask))
    assert all(
        written or not weight
        for weight, written in zip(compute_token_weights(ledger, weigh_last_turn, "t"), ledger.mask, strict=True)
    )


def test_user_function_weighs_tokens_and_its_errors_are_explained() -> None:
    def half(ledger: Ledger) -> list[float]:
        return [written / 2 for written in ledger.mask]

    assert compute_token_weights(LEDGER, half, "t/0") == (0.0, 0.0, 0.5, 0.0, 0.0, 0.5, 0.5)
    for weights, text in (
        ([1.0], "rollout t/0: wrong returned 1 weights for 7 tokens"),
        ([0, 0, math.nan, 0, 0, 0, 0], "gave token 2 a weight of nan"),
        ([0, 0, -1, 0, 0, 0, 0], "gave token 2 a weight of -1.0"),
        ([0, 0, 0, 1, 0, 0, 0], "gave token 3 a weight, but the tool wrote it"),
        (None, "rollout t/0: wrong returned None, not a list of 7 numbers"),
        (0.5, "wrong returned 0.5, not a list of 7 numbers"),
        ([0, None], "gave token 1 a weight of None, not a number"),
        ((1 / 0 for _ in "x"), "wrong raised ZeroDivisionError: division by zero .*test_algorithm_settings.py:"),
    ):

        def wrong(ledger: Ledger, weights: Any = weights) -> Any:
            return weights

        with pytest.raises(TokenWeightError, match=f"algorithm.credit.trained_turns: .*{text}") as caught:
            compute_token_weights(LEDGER, wrong, "t/0")
        assert "remedy: fix that function, then continue with --resume" in str(caught.value)
