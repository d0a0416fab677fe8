"""Engine and trainer compared: always measured, mended only where asked; loops say what is right."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from tests.trainer.learn import slow
from trainer.learn.aggregate import Totals
from trainer.learn.loss import loss
from trainer.learn.mismatch import factors, measure
from trainer.learn.settings import AlgorithmSettings, MismatchSettings


def logs(made: slow.Slow) -> list[dict[int, float]]:
    """Of each sequence, of each trained token, how much likelier the trainer has it."""
    return [
        {token: old[token] - row.engine[token] for token in slow.trained(row)}
        for row, old in zip(made.rows, made.old, strict=True)
    ]


def test_it_is_measured_as_loops_measure_it() -> None:
    made = slow.make(3)
    seen, apart = measure(made.batch()), [value for one in logs(made) for value in one.values()]
    assert seen.tokens == len(apart)
    assert seen.mean == pytest.approx(sum(map(abs, apart)) / len(apart), rel=1e-5)
    assert seen.most == pytest.approx(max(map(abs, apart)), rel=1e-5)
    assert seen.kl == pytest.approx(sum(math.exp(d) - 1 - d for d in apart) / len(apart), rel=1e-4)


def ratio(one: dict[int, float], token: int, level: str) -> float:
    if level == "token":
        return math.exp(one[token])
    total = sum(one.values())
    return math.exp(total if level == "sequence" else total / len(one))


def test_nothing_asked_is_nothing_mended() -> None:
    batch = slow.make(3).batch()
    assert torch.equal(factors(batch, MismatchSettings()), batch.trained_T.double())


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_weights_are_ratios_up_to_the_cap(level: str) -> None:
    for seed in range(5):
        made = slow.make(seed, apart=0.6)
        found = iter(factors(made.batch(), MismatchSettings(truncate=level, cap=1.3)).tolist())
        for row, one in zip(made.rows, logs(made), strict=True):
            for token in range(len(row.ids)):
                expected = min(ratio(one, token, level), 1.3) if token in one else 0.0
                assert next(found) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_ratios_out_of_bounds_are_rejected(level: str) -> None:
    rejected = kept = 0
    for seed in range(5):
        made = slow.make(seed, apart=0.6)
        found = iter(factors(made.batch(), MismatchSettings(reject=level, low=0.8, high=1.3)).tolist())
        for row, one in zip(made.rows, logs(made), strict=True):
            for token in range(len(row.ids)):
                inside = token in one and 0.8 <= ratio(one, token, level) <= 1.3
                assert next(found) == float(inside)
                kept, rejected = kept + inside, rejected + (token in one and not inside)
    assert kept and rejected


def test_a_token_weight_puts_right_what_the_engine_got_wrong() -> None:
    """Over everything the engine may sample, weighted tokens have the mean that the trainer's policy gives them."""
    engine = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    trainer = torch.tensor([0.4, 0.2, 0.4], dtype=torch.float64)
    made = slow.make(0, sequences=1)
    made.rows = [slow.Row("t/0", [7, 0, 1, 2], [False, True, True, True], [0.0, *engine.log().tolist()],
                          [0.0, 5.0, -1.0, 2.0], [0.0, 1.0, 1.0, 1.0])]  # fmt: skip
    made.old = made.new = made.ref = [[0.0, *trainer.log().tolist()]]
    weights = factors(made.batch(), MismatchSettings(truncate="token", cap=10.0))[1:]
    worth = torch.tensor([5.0, -1.0, 2.0], dtype=torch.float64)
    assert float((engine * weights * worth).sum()) == pytest.approx(float((trainer * worth).sum()), rel=1e-5)


def test_the_loss_is_weighted_token_by_token_and_tells_of_it() -> None:
    made = slow.make(6, apart=0.7)
    batch, totals, leaf = made.batch(), Totals.of([made.batch()]), made.logprobs()
    asked = MismatchSettings(truncate="token", cap=1.2, reject="token", low=0.7, high=1.6)
    mended = loss(leaf, batch, totals, AlgorithmSettings(mismatch=asked, aggregate="token"))
    plain = loss(leaf, batch, totals, AlgorithmSettings(aggregate="token"))
    factor_T = factors(batch, asked)
    (pull,) = torch.autograd.grad(plain.value, leaf)
    torch.testing.assert_close(torch.autograd.grad(mended.value, leaf)[0], pull * factor_T)
    trained = batch.trained_T
    assert mended.metrics["mismatch/rejected"] == pytest.approx(float((factor_T[trained] == 0).double().mean()))
    assert mended.metrics["mismatch/factor"] == pytest.approx(float(factor_T[trained].mean()))
    assert plain.metrics["mismatch/max"] == mended.metrics["mismatch/max"] == measure(batch).most


def test_engines_are_exact_only_where_every_token_is_within_the_bound() -> None:
    batch = slow.make(1).batch()
    token = int(batch.trained_T.nonzero()[-1])
    off = torch.zeros_like(batch.old_T)
    off[token] = 1e-3
    assert measure(replace(batch, old_T=batch.engine_T)).within(0.0)
    assert not measure(replace(batch, old_T=batch.engine_T + off)).within(1e-4)
    nothing = replace(batch, weights_T=torch.zeros_like(batch.weights_T))
    assert measure(nothing).tokens == 0 and not measure(nothing).within(1.0)
