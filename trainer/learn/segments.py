"""What lies packed end to end is summed by a name for each element; nothing is padded to be summed."""

from __future__ import annotations

import torch
from torch import Tensor


def total(values_N: Tensor, cell_N: Tensor, cells: int) -> Tensor:
    """The sum of each cell's values."""
    return values_N.new_zeros(cells).index_add(0, cell_N, values_N)


def count(cell_N: Tensor, cells: int) -> Tensor:
    """How many elements each cell has."""
    return torch.bincount(cell_N, minlength=cells)


def places(sequence_N: Tensor) -> Tensor:
    """Of each element, its place in its own sequence; sequences lie end to end."""
    sizes = count(sequence_N, int(sequence_N.max()) + 1 if len(sequence_N) else 0)
    return torch.arange(len(sequence_N), device=sequence_N.device) - (sizes.cumsum(0) - sizes)[sequence_N]


def numbered(names_N: Tensor) -> tuple[Tensor, int]:
    """Any integers as cells counted from 0, and how many cells there are."""
    cell_N = torch.unique(names_N, return_inverse=True)[1]
    return cell_N, int(cell_N.max()) + 1 if len(cell_N) else 0


def varied(values_N: Tensor, cell_N: Tensor, cells: int) -> Tensor:
    """Of each element, whether its cell has two different values: asked of the values, since means round."""
    high = values_N.new_full((cells,), -torch.inf).scatter_reduce(0, cell_N, values_N, "amax")
    low = values_N.new_full((cells,), torch.inf).scatter_reduce(0, cell_N, values_N, "amin")
    return (high > low)[cell_N]


def to_go(values_N: Tensor, sequence_N: Tensor, discount: float = 1.0) -> Tensor:
    """Of each element, its own value and all that follow in its sequence, each step ahead discounted once more."""
    if not len(values_N):
        return values_N
    place_N = places(sequence_N)
    # Laid out by place, one step serves all sequences at once.
    laid_SP = values_N.new_zeros(int(sequence_N.max()) + 1, int(place_N.max()) + 1)
    laid_SP[sequence_N, place_N] = values_N
    ahead_S = laid_SP.new_zeros(len(laid_SP))
    for place in reversed(range(laid_SP.shape[1])):
        ahead_S = laid_SP[:, place] + discount * ahead_S
        laid_SP[:, place] = ahead_S
    return laid_SP[sequence_N, place_N]
