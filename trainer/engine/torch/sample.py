"""An id is drawn with one number, which its seed and its place alone decide: no neighbour in the batch has a say."""

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
    """One row's wish: how to sample, and the place in the sequence of what is sampled."""

    sampling: Sampling
    seed: int
    place: int


def sample(logits: Tensor, draws: Sequence[Draw]) -> tuple[list[int], list[float]]:
    """An id for each row of logits, and its logprob under the temperature, before anything was barred or filtered.

    At temperature 0 the likeliest id is taken, and its logprob is that of temperature 1.
    """
    temperatures = torch.tensor([draw.sampling.temperature or 1.0 for draw in draws], device=logits.device)
    logprobs = torch.log_softmax(logits.float() / temperatures[:, None], dim=-1)
    chances = chance(logprobs, [draw.sampling for draw in draws])
    totals = chances.cumsum(dim=-1, dtype=torch.float64)
    marks = torch.from_numpy(noise([draw.seed for draw in draws], [draw.place for draw in draws])).to(logits.device)
    chosen = torch.searchsorted(totals, marks[:, None] * totals[:, -1:], right=True)[:, 0]
    if greedy := [index for index, draw in enumerate(draws) if draw.sampling.temperature == 0]:
        chosen[greedy] = chances[greedy].argmax(dim=-1)
    chosen.clamp_(max=logits.shape[-1] - 1)  # only where the weights have gone wrong and nothing adds up
    taken = logprobs.gather(1, chosen[:, None])[:, 0]
    return chosen.tolist(), taken.tolist()


def chance(logprobs: Tensor, samplings: Sequence[Sampling]) -> Tensor:
    """What is left of each row's distribution once ids are barred and filters have cut; it need not add up to 1.

    Every filter looks at the distribution as it is without the barred ids, so their order does not matter: an id stays
    if it is among the `top_k` likeliest, if those likelier than it hold less than `top_p`, and if it is at least
    `min_p` times as likely as the likeliest.
    """
    chances = logprobs.exp()
    alike: defaultdict[tuple[int, ...], list[int]] = defaultdict(list)
    for index, sampling in enumerate(samplings):
        alike[sampling.barred].append(index)
    for barred, rows in alike.items():
        if barred:
            chances[torch.tensor(rows)[:, None], torch.tensor(barred)] = 0.0
    rows = [index for index, sampling in enumerate(samplings) if _filters(sampling)]
    if rows:
        chances[rows] = _filtered(chances[rows], [samplings[index] for index in rows])
    return chances


def _filters(sampling: Sampling) -> bool:
    return sampling.top_p < 1 or sampling.top_k > 0 or sampling.min_p > 0


def _filtered(chances: Tensor, samplings: Sequence[Sampling]) -> Tensor:
    def column(values: Sequence[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64, device=chances.device)[:, None]

    ordered, ids = chances.sort(dim=-1, descending=True, stable=True)
    mass = ordered.double()
    before = mass.cumsum(dim=-1) - mass
    total = mass.sum(dim=-1, keepdim=True)
    ranks = torch.arange(chances.shape[-1], device=chances.device)
    keep = ranks < column([sampling.top_k or chances.shape[-1] for sampling in samplings])
    keep &= before < column([sampling.top_p if sampling.top_p < 1 else 2.0 for sampling in samplings]) * total
    keep &= mass >= column([sampling.min_p for sampling in samplings]) * mass[:, :1]
    keep[:, 0] = True
    return torch.zeros_like(chances).scatter(1, ids, ordered * keep)


def noise(seeds: Sequence[int], places: Sequence[int]) -> NDArray[np.float64]:
    """Evenly spread over [0, 1), a number for each seed and place: SplitMix64 twice."""
    mixed = _mix(np.array([seed % 2**64 for seed in seeds], dtype=np.uint64))
    mixed = _mix(mixed ^ np.array(places, dtype=np.uint64) * GOLDEN)
    spread: NDArray[np.float64] = (mixed >> np.uint64(32)).astype(np.float64) * 2.0**-32
    return spread


def _mix(state: NDArray[np.uint64]) -> NDArray[np.uint64]:
    state = state + GOLDEN
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))
