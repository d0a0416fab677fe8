"""Sampling: comparison with a plain reference, and properties that hold for every distribution."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.engine.base import Sampling
from trainer.engine.torch.sampling import (
    Draw,
    fill_banned,
    filter_probabilities,
    filters_of,
    sample,
    sample_rows,
    uniform_noise,
)

VOCAB_SIZE = 12
LOGITS = st.lists(st.floats(-8, 8, width=32), min_size=VOCAB_SIZE, max_size=VOCAB_SIZE)
SAMPLING = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.5, 1.0, 2.0]),
    top_p=st.sampled_from([0.05, 0.5, 0.9, 1.0]),
    top_k=st.sampled_from([0, 1, 3, 50]),
    banned_ids=st.sets(st.integers(0, VOCAB_SIZE - 1), max_size=VOCAB_SIZE - 1).map(lambda ids: tuple(sorted(ids))),
    seed=st.integers(0, 2**64),
)
ROWS = st.lists(st.tuples(LOGITS, SAMPLING, st.integers(0, 10**6)), min_size=1, max_size=6)


def filter_reference(logits: list[float], sampling: Sampling) -> tuple[set[int], set[int]]:
    """Ids that certainly pass the filters, and those that may, depending on rounding."""
    scaled = np.array(logits, dtype=np.float64) / (sampling.temperature or 1.0)
    probabilities = np.exp(scaled - scaled.max())
    probabilities[list(sampling.banned_ids)] = 0
    probabilities /= probabilities.sum()
    certain, possible = set(), set()
    for token, probability in enumerate(probabilities):
        likelier = probabilities[probabilities > probability]
        ties_before = sum(probabilities[:token] == probability)
        mass = likelier.sum() + ties_before * probability
        for slack, passing in ((-1e-5, certain), (1e-5, possible)):
            passes = not sampling.top_k or len(likelier) + ties_before < sampling.top_k
            passes &= sampling.top_p >= 1 or mass < sampling.top_p + slack
            if token not in sampling.banned_ids and (passes or len(likelier) + ties_before == 0):
                passing.add(token)
    return certain, possible


def make_draws(rows: list[tuple[list[float], Sampling, int]]) -> list[Draw]:
    return [Draw(sampling, sampling.seed or 0, position) for _, sampling, position in rows]


@settings(deadline=None)
@given(ROWS)
def test_filters_agree_with_the_reference(rows: list[tuple[list[float], Sampling, int]]) -> None:
    samplings = [sampling for _, sampling, _ in rows]
    scaled = torch.tensor([logits for logits, _, _ in rows]) / torch.tensor([[s.temperature or 1.0] for s in samplings])
    probabilities = filter_probabilities(scaled.log_softmax(-1), samplings)
    for (logits, sampling, _), row in zip(rows, probabilities.tolist(), strict=True):
        remaining = {token for token, probability in enumerate(row) if probability > 0}
        certain, possible = filter_reference(logits, sampling)
        ties = len({round(value, 4) for value in logits}) < VOCAB_SIZE
        assert len(remaining) in range(len(certain), len(possible) + 1) if ties else certain <= remaining <= possible


@settings(deadline=None)
@given(ROWS)
def test_sampling_without_the_host_chooses_the_same_ids(rows: list[tuple[list[float], Sampling, int]]) -> None:
    logits, draws = torch.tensor([logits for logits, _, _ in rows]), make_draws(rows)
    samplings = [sampling for _, sampling, _ in rows]
    is_banned = torch.zeros(logits.shape, dtype=torch.bool)
    fill_banned(is_banned, samplings, 1.0)
    noise = uniform_noise([draw.seed for draw in draws], [draw.position for draw in draws])
    top_k, top_p = torch.tensor([filters_of(sampling, VOCAB_SIZE) for sampling in samplings], dtype=torch.float64).T
    temperatures = torch.tensor([sampling.temperature or 1.0 for sampling in samplings])
    is_greedy = torch.tensor([sampling.temperature == 0 for sampling in samplings])
    rows_of = torch.from_numpy(noise), temperatures, is_greedy, is_banned
    ids, logprobs = sample_rows(logits, *rows_of, (top_k, top_p))
    assert (ids.tolist(), logprobs.tolist()) == sample(logits, draws)


def test_frequencies_match_the_probabilities() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, -1.0]])
    count = 20_000
    ids, _ = sample(logits.expand(count, -1), [Draw(Sampling(), seed, seed % 7) for seed in range(count)])
    expected = logits.softmax(-1)[0].tolist()
    for token, share in Counter(ids).items():
        assert share / count == pytest.approx(expected[token], abs=0.015)


def test_noise_is_uniform_over_positions_and_over_seeds() -> None:
    count = 10_000
    for seeds, positions in (([3] * count, range(count)), (range(count), [3] * count)):
        noise = uniform_noise(list(seeds), list(positions))
        assert 0 <= noise.min() <= noise.max() < 1
        assert np.histogram(noise, bins=10, range=(0, 1))[0] == pytest.approx([count / 10] * 10, rel=0.12)
        assert abs(np.corrcoef(noise[:-1], noise[1:])[0, 1]) < 0.03
