"""Sampling against the plainest reference, and laws that hold for every distribution."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.engine.base import Sampling
from trainer.engine.torch.sample import Draw, chance, noise, sample

VOCABULARY = 12
LOGITS = st.lists(st.floats(-8, 8, width=32), min_size=VOCABULARY, max_size=VOCABULARY)
SAMPLING = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.5, 1.0, 2.0]),
    top_p=st.sampled_from([0.05, 0.5, 0.9, 1.0]),
    top_k=st.sampled_from([0, 1, 3, 50]),
    min_p=st.sampled_from([0.0, 0.1, 0.9]),
    barred=st.sets(st.integers(0, VOCABULARY - 1), max_size=VOCABULARY - 1).map(lambda ids: tuple(sorted(ids))),
    seed=st.integers(0, 2**64),
)
ROWS = st.lists(st.tuples(LOGITS, SAMPLING, st.integers(0, 10**6)), min_size=1, max_size=6)


def kept(logits: list[float], sampling: Sampling) -> tuple[set[int], set[int]]:
    """Ids that surely stay and those that may: what rounding decides is left open."""
    scaled = np.array(logits, dtype=np.float64) / (sampling.temperature or 1.0)
    chances = np.exp(scaled - scaled.max())
    chances[list(sampling.barred)] = 0
    chances /= chances.sum()
    surely, maybe = set(), set()
    for token, one in enumerate(chances):
        above = chances[chances > one]
        level = sum(chances[:token] == one)
        mass = above.sum() + level * one
        for slack, into in ((-1e-5, surely), (1e-5, maybe)):
            stays = not sampling.top_k or len(above) + level < sampling.top_k
            stays &= sampling.top_p >= 1 or mass < sampling.top_p + slack
            stays &= one >= sampling.min_p * chances.max() * (1 - slack)
            if token not in sampling.barred and (stays or len(above) + level == 0):
                into.add(token)
    return surely, maybe


def draws(rows: list[tuple[list[float], Sampling, int]]) -> list[Draw]:
    return [Draw(sampling, sampling.seed or 0, place) for _, sampling, place in rows]


@settings(deadline=None)
@given(ROWS)
def test_filters_keep_what_the_reference_keeps(rows: list[tuple[list[float], Sampling, int]]) -> None:
    samplings = [sampling for _, sampling, _ in rows]
    scaled = torch.tensor([logits for logits, _, _ in rows]) / torch.tensor([[s.temperature or 1.0] for s in samplings])
    chances = chance(scaled.log_softmax(-1), samplings)
    for (logits, sampling, _), row in zip(rows, chances.tolist(), strict=True):
        left = {token for token, one in enumerate(row) if one > 0}
        surely, maybe = kept(logits, sampling)
        ties = len({round(value, 4) for value in logits}) < VOCABULARY
        assert len(left) in range(len(surely), len(maybe) + 1) if ties else surely <= left <= maybe


@settings(deadline=None)
@given(ROWS)
def test_a_row_is_sampled_as_if_it_were_alone(rows: list[tuple[list[float], Sampling, int]]) -> None:
    logits = torch.tensor([logits for logits, _, _ in rows])
    ids, logprobs = sample(logits, draws(rows))
    for index, row in enumerate(rows):
        assert sample(logits[index : index + 1], draws([row])) == ([ids[index]], [logprobs[index]])


@settings(deadline=None)
@given(ROWS)
def test_what_is_sampled_was_kept_and_carries_the_unfiltered_logprob(
    rows: list[tuple[list[float], Sampling, int]],
) -> None:
    ids, logprobs = sample(torch.tensor([logits for logits, _, _ in rows]), draws(rows))
    for (logits, sampling, _), token, logprob in zip(rows, ids, logprobs, strict=True):
        assert token not in sampling.barred
        assert token in kept(logits, sampling)[1] or len({round(value, 4) for value in logits}) < VOCABULARY
        scaled = torch.tensor(logits) / (sampling.temperature or 1.0)
        assert logprob == pytest.approx(float(scaled.log_softmax(-1)[token]), abs=1e-5)


@settings(deadline=None)
@given(LOGITS, st.integers(0, 2**64))
def test_the_likeliest_alone_is_what_greedy_takes(logits: list[float], seed: int) -> None:
    rows = torch.tensor([logits, logits])
    one, other = sample(rows, [Draw(Sampling(top_k=1), seed, 0), Draw(Sampling(temperature=0), seed, 0)])[0]
    assert one == other


def test_ids_come_as_often_as_their_chances_say() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, -1.0]])
    count = 20_000
    ids, _ = sample(logits.expand(count, -1), [Draw(Sampling(), seed, seed % 7) for seed in range(count)])
    expected = logits.softmax(-1)[0].tolist()
    for token, share in Counter(ids).items():
        assert share / count == pytest.approx(expected[token], abs=0.015)


def test_noise_is_even_over_places_and_over_seeds() -> None:
    count = 10_000
    for seeds, places in (([3] * count, range(count)), (range(count), [3] * count)):
        marks = noise(list(seeds), list(places))
        assert 0 <= marks.min() <= marks.max() < 1
        assert np.histogram(marks, bins=10, range=(0, 1))[0] == pytest.approx([count / 10] * 10, rel=0.12)
        assert abs(np.corrcoef(marks[:-1], marks[1:])[0, 1]) < 0.03


def test_a_seed_may_be_any_number() -> None:
    assert noise([-1], [0]) == noise([2**64 - 1], [0])
    assert noise([2**65 + 5], [9]) == noise([5], [9])
