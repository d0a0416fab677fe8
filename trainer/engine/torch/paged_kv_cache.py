"""The KV cache for decoding on a GPU: pages of one pool that never moves, so that CUDA graphs may have its address."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor

from trainer.engine.torch.kv_cache import KVCache, KVShape

PAGE = 128
"""Positions of a page: a block of FlexAttention's masks."""
MEMORY_SHARE = 0.5
"""The most that the pool takes of the memory that is free at the start: the trainer's passes need the rest."""


def page_count(length: int) -> int:
    """The pages of a sequence of this length."""
    return -(-length // PAGE)


def planned_positions(length: int) -> int:
    """The positions that are planned for a sequence of this length: its pages, and one to go on in."""
    return PAGE * (page_count(length) + 1)


def wanted_pages(sequences: int, length: int) -> int:
    """Pages for so many sequences of this length."""
    return sequences * planned_positions(length) // PAGE + 2


def plan_pages(shape: KVShape, wanted: int) -> int:
    """As many of these pages as free memory has room for."""
    if shape.device.type != "cuda":
        return wanted
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(shape.device)
    return min(wanted, max(2, int(MEMORY_SHARE * free) // (PAGE * shape.bytes_per_token)))


class PagedKVCache(KVCache):
    """Keys and values of slots, each a list of pages. A page is a slot of `KVCache`, and may be in several lists: what
    siblings have in common. Page 0 is nobody's, and takes what rows without a sequence write."""

    def __init__(self, shape: KVShape, slots: int, pages: int) -> None:
        super().__init__(shape, pages)
        self.pages = pages
        self.values = self._allocate(PAGE)
        self._pages: list[list[int]] = [[] for _ in range(slots)]
        self._uses = [0] * pages
        self._unused = list(range(pages - 1, 0, -1))

    def clear(self) -> None:
        """Clears all values, where they are."""
        self.values.zero_()

    def reserve(self, lengths: Mapping[int, int], used: int) -> None:
        for slot, length in lengths.items():
            while len(self._pages[slot]) < page_count(length):
                self._pages[slot].append(self._take())

    def is_short(self, lengths: Mapping[int, int], pages: int) -> bool:
        """Whether there are fewer pages than so many positions in each slot take, and so many more."""
        new = sum(max(0, page_count(length) - len(self._pages[slot])) for slot, length in lengths.items())
        return new + pages > len(self._unused)

    def move(self, source: int, target: int, length: int) -> None:
        """Gives a slot the first positions of another: whole pages are shared, a last one is copied."""
        whole = length // PAGE
        pages = self._pages[source][:whole]
        for page in pages:
            self._uses[page] += 1
        self._pages[target] = pages
        if length % PAGE:
            pages.append(self._take())
            self.values[:, :, pages[-1]] = self.values[:, :, self._pages[source][whole]]

    def free(self, slot: int, last: int, length: int) -> None:
        for page in self._pages[slot]:
            self._uses[page] -= 1
            if not self._uses[page]:
                self._unused.append(page)
        self._pages[slot] = []
        self._pages[slot], self._pages[last] = self._pages[last], self._pages[slot]

    def free_all(self) -> None:
        for slot in range(len(self._pages)):
            self.free(slot, slot, 0)

    def table(self, slots: Iterable[int]) -> Tensor:
        """The pages of each slot, with page 0 after the last."""
        pages = [self._pages[slot] for slot in slots]
        width = max(map(len, pages))
        return torch.tensor([row + [0] * (width - len(row)) for row in pages], device=self._shape.device)

    def places(self, slots: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        table = self.table(range(len(self._pages)))
        return table[slots, positions // PAGE], positions % PAGE

    def selector(self, slots: slice, length: int) -> Callable[[Tensor], Tensor]:
        table = self.table(range(slots.start, slots.stop))
        return lambda kv_layer: gather_pages(kv_layer, table)[..., :length, :]

    def read(self, slot: int, start: int, end: int) -> Tensor:
        pages, positions = self._span(slot, start, end)
        return self.values[:, :, pages, :, positions].permute(1, 2, 3, 0, 4)

    def write(self, slot: int, start: int, values: Tensor) -> None:
        pages, positions = self._span(slot, start, start + values.shape[3])
        self.values[:, :, pages, :, positions] = values.permute(3, 0, 1, 2, 4)

    def _span(self, slot: int, start: int, end: int) -> tuple[Tensor, Tensor]:
        positions = torch.arange(start, end, device=self._shape.device)
        return self.table([slot])[0][positions // PAGE], positions % PAGE

    def _take(self) -> int:
        if not self._unused:
            raise MemoryError("no page of the KV cache is free")
        page = self._unused.pop()
        self._uses[page] = 1
        return page

    def _allocate(self, length: int) -> Tensor:
        """The axes of `KVCache`; in memory, all pages of a head stand together, as FlexAttention takes them."""
        shape = self._shape
        axes = (shape.layers, 2, shape.heads, self._slots, length, shape.head_dim)
        return torch.zeros(axes, dtype=shape.dtype, device=shape.device).transpose(2, 3)


def gather_pages(kv_layer: Tensor, table_BP: Tensor) -> Tensor:
    """A layer's keys and values, in axes of kind, row, head, position and size."""
    return kv_layer[:, table_BP].transpose(2, 3).flatten(3, 4)
