"""Samples token ids reproducibly: each id depends on its seed and position, not on the rest of the batch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trainer.engine.base import Sampling

GOLDEN = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True, slots=True)
class Draw:
    """How to sample one sequence's next id, and its position in the sequence."""

    sampling: Sampling
    seed: int
    position: int


def sample(logits: Tensor, draws: Sequence[Draw]) -> tuple[list[int], list[float]]:
    """An id for each row of logits, and its logprob after the temperature, before bans and filters.

    At temperature 0 the likeliest id is chosen, with its logprob at temperature 1.
    """
    temperatures = torch.tensor([draw.sampling.temperature or 1.0 for draw in draws], device=logits.device)
    logprobs = torch.log_softmax(logits.float() / temperatures[:, None], dim=-1)
    probabilities = filter_probabilities(logprobs, [draw.sampling for draw in draws])
    noise = uniform_noise([draw.seed for draw in draws], [draw.position for draw in draws])
    ids = _choose(probabilities, torch.from_numpy(noise).to(logits.device))
    if greedy := [index for index, draw in enumerate(draws) if draw.sampling.temperature == 0]:
        ids[greedy] = probabilities[greedy].argmax(dim=-1)
    sampled_logprobs = logprobs.gather(1, ids[:, None])[:, 0]
    return ids.tolist(), sampled_logprobs.tolist()


def sample_rows(
    logits: Tensor,
    noise: Tensor,
    temperatures: Tensor,
    is_greedy: Tensor,
    is_banned: Tensor,
    filters: tuple[Tensor, Tensor] | None,
) -> tuple[Tensor, Tensor]:
    """The same on the device alone. `filters`: each row's `top_k` and `top_p`, above all ids and above 1 for none."""
    logprobs = torch.log_softmax(logits.float() / temperatures[:, None], dim=-1)
    probabilities = logprobs.exp().masked_fill_(is_banned, 0.0)
    if filters:
        probabilities = _apply_filters(probabilities, *filters)
    ids = torch.where(is_greedy, probabilities.argmax(dim=-1), _choose(probabilities, noise))
    return ids, logprobs.gather(1, ids[:, None])[:, 0]


def _choose(probabilities: Tensor, noise: Tensor) -> Tensor:
    """The id in which each row's share `noise` of the probabilities ends."""
    cumulative = probabilities.cumsum(dim=-1, dtype=torch.float64)
    ids = torch.searchsorted(cumulative, noise[:, None] * cumulative[:, -1:], right=True)[:, 0]
    return ids.clamp_(max=probabilities.shape[-1] - 1)  # Only needed if weights are broken and the sum is not finite.


def filter_probabilities(logprobs: Tensor, samplings: Sequence[Sampling]) -> Tensor:
    """Each row's probabilities, with zeros for banned and filtered ids; rows need not sum to 1.

    Every filter uses the distribution without banned ids, so their order does not matter: an id stays if it is among
    the `top_k` likeliest, and if likelier ids together have less than `top_p`.
    """
    probabilities = logprobs.exp()
    fill_banned(probabilities, samplings, 0.0)
    rows = [index for index, sampling in enumerate(samplings) if has_filters(sampling)]
    if rows:
        filters = [filters_of(samplings[index], logprobs.shape[-1]) for index in rows]
        columns = torch.tensor(filters, dtype=torch.float64, device=logprobs.device).T
        probabilities[rows] = _apply_filters(probabilities[rows], *columns)
    return probabilities


def fill_banned(rows_BV: Tensor, samplings: Sequence[Sampling], value: float) -> None:
    """Writes a value at the banned ids of each row."""
    rows_by_ban: defaultdict[tuple[int, ...], list[int]] = defaultdict(list)
    for index, sampling in enumerate(samplings):
        rows_by_ban[sampling.banned_ids].append(index)
    for banned_ids, rows in rows_by_ban.items():
        if banned_ids:
            rows_BV[torch.tensor(rows)[:, None], torch.tensor(banned_ids)] = value


def has_filters(sampling: Sampling) -> bool:
    """Whether ids are left out for their probability."""
    return sampling.top_p < 1 or sampling.top_k > 0


def filters_of(sampling: Sampling, vocabulary: int) -> tuple[float, float]:
    """`top_k` and `top_p`, so high that they leave nothing out where there are none."""
    return sampling.top_k or vocabulary, sampling.top_p if sampling.top_p < 1 else 2.0


def _apply_filters(probabilities: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    ordered, ids = probabilities.sort(dim=-1, descending=True, stable=True)
    mass = ordered.double()
    before = mass.cumsum(dim=-1) - mass
    total = mass.sum(dim=-1, keepdim=True)
    ranks = torch.arange(probabilities.shape[-1], device=probabilities.device)
    keep = ranks < top_k[:, None]
    keep &= before < top_p[:, None] * total
    keep[:, 0] = True
    return torch.zeros_like(probabilities).scatter(1, ids, ordered * keep)


def uniform_noise(seeds: Sequence[int], positions: Sequence[int]) -> NDArray[np.float64]:
    """A number in [0, 1) for each seed and position, by two rounds of SplitMix64."""
    mixed = _splitmix64(np.array([seed % 2**64 for seed in seeds], dtype=np.uint64))
    mixed = _splitmix64(mixed ^ np.array(positions, dtype=np.uint64) * GOLDEN)
    noise: NDArray[np.float64] = (mixed >> np.uint64(32)).astype(np.float64) * 2.0**-32
    return noise


def _splitmix64(state: NDArray[np.uint64]) -> NDArray[np.uint64]:
    state = state + GOLDEN
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))
