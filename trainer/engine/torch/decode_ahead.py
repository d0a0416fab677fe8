"""Decodes several steps ahead of the host, on tensors that stay where they are, so that CUDA graphs may replay them.

The host learns of the sampled ids after the last of these steps; what a sequence sampled after its end is dropped. On a
CPU the same steps run one operation after the other, and attention gathers pages, which is what the tests compare. On a
GPU, steps have the trainer's stream: they take turns with an update's kernels beside rollouts, and do not overlap them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from trainer.engine.torch.dense_model import DenseModel
from trainer.engine.torch.paged_kv_cache import PAGE, PagedKVCache, gather_pages, page_count
from trainer.engine.torch.sampling import fill_banned, filters_of, has_filters, sample_rows, uniform_noise
from trainer.engine.torch.sequence import Lane

BUCKET_FACTOR = 4
"""Rows of a bucket over those of the next smaller one: a step reads the weights, whatever its rows."""
UNSEEN = 2**30
"""In place of the first position of a page that is not a row's."""
Step = Callable[[], object]
log = logging.getLogger(__name__)


class DecodePlan:
    """Attention of one query a row to the pages of that row, up to its position."""

    last = slice(None)

    def __init__(self, table_BP: Tensor, position_B: Tensor, first_BN: Tensor | None) -> None:
        """`first_BN` has the first position of each page of the pool in each row, for FlexAttention; without it, pages
        are gathered."""
        page_B = table_BP.gather(1, (position_B // PAGE)[:, None])[:, 0]
        self.places = page_B.long(), position_B % PAGE
        self.count = self.rows = len(position_B)
        self._table_BP, self._position_B, self._first_BN = table_BP, position_B, first_BN
        self._mask: BlockMask | None = None

    def attend(self, queries: Tensor, kv_layer: Tensor) -> Tensor:
        """Heads that share keys are a kernel's queries, since none of them has more than this one position."""
        by_head = queries.view(len(queries), kv_layer.shape[2], -1, queries.shape[-1])
        if self._first_BN is None:
            keys, values = gather_pages(kv_layer, self._table_BP)
            positions = torch.arange(keys.shape[2], device=keys.device)
            is_seen = positions <= self._position_B[:, None, None, None]
            return F.scaled_dot_product_attention(by_head, keys, values, is_seen).flatten(1)
        if self._mask is None:
            self._mask = make_mask(self._table_BP, self._position_B, self._first_BN, by_head.shape[2])
        keys, values = kv_layer.transpose(1, 2).flatten(2, 3)[:, None]
        output: Tensor = flex_kernel()(by_head.contiguous(), keys, values, block_mask=self._mask)
        return output.flatten(1)


def make_mask(table_BP: Tensor, position_B: Tensor, first_BN: Tensor, queries: int) -> BlockMask:
    """Which pages of the pool a row's queries see, and what of them."""

    def sees(row: Tensor, _head: Tensor, _query: Tensor, key: Tensor) -> Tensor:
        return first_BN[row, key // PAGE] + key % PAGE <= position_B[row]

    counts = (position_B // PAGE + 1).int()[:, None, None]
    lengths = (queries, first_BN.shape[1] * PAGE)
    pages = table_BP.int()[:, None, None]
    return BlockMask.from_kv_blocks(
        counts, pages, BLOCK_SIZE=PAGE, mask_mod=sees, seq_lengths=lengths, compute_q_blocks=False
    )


@cache
def flex_kernel() -> Any:
    """FlexAttention, compiled for each bucket; with more of them than torch compiles, it fails rather than crawls."""
    return torch.compile(_attend_flex, fullgraph=True, dynamic=False)


def _attend_flex(queries: Tensor, keys: Tensor, values: Tensor, block_mask: BlockMask) -> Any:
    """Has kernels of its own in torch's cache, which is limited for each function."""
    return flex_attention(queries, keys, values, block_mask=block_mask)


class DecodeAhead:
    """The state of a batch's rows on the device, and the step that changes it."""

    def __init__(self, model: DenseModel, kv_cache: PagedKVCache, rows: int, steps: int) -> None:
        self.steps = steps
        self.notes: tuple[str, ...] = ()
        self.kv_cache = kv_cache
        self._model = model
        device = model.shape.device
        self._rotation = model.rotation_table(min(model.context_length, kv_cache.pages * PAGE) + steps)
        self._sizes = [rows]
        while self._sizes[0] > BUCKET_FACTOR:
            self._sizes.insert(0, -(-self._sizes[0] // BUCKET_FACTOR))

        def zeros(*axes: int, dtype: torch.dtype = torch.long) -> Tensor:
            return torch.zeros(axes, dtype=dtype, device=device)

        self._ids, self._positions, self._offsets = zeros(rows), zeros(rows), zeros(rows)
        self._table = zeros(rows, kv_cache.pages, dtype=torch.int32)
        self._first = zeros(rows, kv_cache.pages, dtype=torch.int32)
        self._noise, self._top_k, self._top_p = (zeros(rows, dtype=torch.float64) for _ in range(3))
        self._temperatures, self._logprobs = zeros(rows, dtype=torch.float32), zeros(rows, dtype=torch.float32)
        self._is_greedy, self._banned = zeros(rows, dtype=torch.bool), zeros(rows, model.vocab_size, dtype=torch.bool)
        self._bans: list[tuple[int, ...]] = []
        self._modes = [(True, True), (False, True), (False, False)] if device.type == "cuda" else [(False, False)]
        """FlexAttention or gathered pages, and graphs or not: the first is tried, and the next where it fails."""
        self._place = make_place(device)
        self._prepared: dict[tuple[int, int, bool], Step] = {}

    @torch.inference_mode()
    def prepare(self) -> None:
        """Makes the graphs of most runs, so that what fails is known at the start."""
        for size in self._sizes:
            self._step_of(size, 1, is_filtered=False)

    def run(self, lanes: Sequence[Lane]) -> list[tuple[list[int], list[float]]]:
        """The ids that each lane's one sequence samples next, with their logprobs."""
        sequences = [lane.sequences[0] for lane in lanes]
        steps = min(self.steps, max(each.sampling.max_tokens - len(each.logprobs) for each in sequences))
        size = next(size for size in self._sizes if size >= len(lanes))
        pages = max(page_count(len(sequence.ids) - 1 + steps) for sequence in sequences)
        is_filtered = any(has_filters(sequence.sampling) for sequence in sequences)
        step = self._step_of(size, 1 << (pages - 1).bit_length(), is_filtered=is_filtered)
        self._load(lanes)
        draws = [(each.seed, len(each.ids) + number) for number in range(steps) for each in sequences]
        noise_SB = torch.from_numpy(uniform_noise(*zip(*draws, strict=True))).view(steps, -1).to(self._noise.device)
        ids_SB = torch.empty(steps, len(lanes), dtype=torch.long, device=self._ids.device)
        logprobs_SB = torch.empty(steps, len(lanes), device=self._ids.device)
        for number in range(steps):
            self._noise[: len(lanes)] = noise_SB[number]
            step()
            ids_SB[number] = self._ids[: len(lanes)]
            logprobs_SB[number] = self._logprobs[: len(lanes)]
        return list(zip(ids_SB.T.tolist(), logprobs_SB.T.tolist(), strict=True))

    def _step_of(self, size: int, pages: int, *, is_filtered: bool) -> Step:
        """The step for a bucket: a graph, or what is possible instead, which a note tells."""
        while True:
            uses_flex, uses_graph = self._modes[0]
            key = (size, self.kv_cache.pages if uses_flex else pages, is_filtered)
            if key in self._prepared:
                return self._prepared[key]
            step = partial(self._step, *key, uses_flex)
            try:
                self._load([])  # Steps before the capture write into page 0.
                self._prepared[key] = capture(step, self._place) if uses_graph else step
            except Exception as error:  # boundary: compilers and drivers raise anything
                if not uses_graph:
                    raise
                self._modes.pop(0)
                self._prepared.clear()
                self._place = make_place(self._ids.device)  # What failed may have left a capture, or memory, behind.
                cause: BaseException = error
                while cause.__context__:  # The end of a failed capture raises an error of its own.
                    cause = cause.__context__
                tried = "FlexAttention in CUDA graphs" if uses_flex else "CUDA graphs"
                note = f"decodes without {tried}, which is slower: {type(cause).__name__}: {str(cause)[:500]}"
                log.warning("the torch engine %s", note, exc_info=error)
                self.notes += (note,)

    def _load(self, lanes: Sequence[Lane]) -> None:
        """Brings the lanes' state to the device; other rows have page 0 alone, and what they sample is dropped."""
        sequences = [lane.sequences[0] for lane in lanes]
        samplings = [sequence.sampling for sequence in sequences]
        self._set(self._ids, [sequence.ids[-1] for sequence in sequences])
        self._set(self._positions, [len(sequence.ids) - 1 for sequence in sequences])
        prepared = [sequence.prepared for sequence in sequences]
        self._set(self._offsets, [images.position_offset if images else 0 for images in prepared])
        self._set(self._temperatures, [sampling.temperature or 1.0 for sampling in samplings], 1.0)
        self._set(self._is_greedy, [sampling.temperature == 0 for sampling in samplings])
        filters = [filters_of(sampling, self._model.vocab_size) for sampling in samplings]
        self._set(self._top_k, [top_k for top_k, _ in filters], 1)
        self._set(self._top_p, [top_p for _, top_p in filters], 1)
        bans = [sampling.banned_ids for sampling in samplings]
        if bans != self._bans:
            self._banned.zero_()
            fill_banned(self._banned, samplings, 1.0)
            self._bans = bans
        self._table.zero_()
        self._first.fill_(UNSEEN)
        if lanes:
            table = self.kv_cache.table([lane.slot for lane in lanes])
            self._table[: len(lanes), : table.shape[1]] = table
            starts = torch.arange(0, table.shape[1] * PAGE, PAGE, dtype=torch.int32, device=table.device)
            self._first[: len(lanes)].scatter_(1, table, starts.expand(len(table), -1))
            self._first[:, 0] = UNSEEN

    @staticmethod
    def _set(target: Tensor, values: Sequence[float], padding: float = 0) -> None:
        target.fill_(padding)
        target[: len(values)] = torch.tensor(values, dtype=target.dtype)

    def _step(self, size: int, pages: int, is_filtered: bool, uses_flex: bool) -> None:
        """One more id of each row, on the device alone."""
        ids, positions = self._ids[:size], self._positions[:size]
        plan = DecodePlan(self._table[:size, :pages], positions, self._first[:size] if uses_flex else None)
        rotation = [part[positions + self._offsets[:size]][:, None] for part in self._rotation]
        logits = self._model.decode(ids, (rotation[0], rotation[1]), plan, self.kv_cache)
        filters = (self._top_k[:size], self._top_p[:size]) if is_filtered else None
        rows = self._temperatures[:size], self._is_greedy[:size], self._banned[:size]
        sampled, logprobs = sample_rows(logits, self._noise[:size], *rows, filters)
        ids.copy_(sampled)
        self._logprobs[:size] = logprobs
        positions += 1


def make_place(device: torch.device) -> Any:
    """A stream and a pool of memory for captures; None on a CPU."""
    if device.type != "cuda":
        return None
    return torch.cuda.Stream(device), torch.cuda.graph_pool_handle()  # type: ignore[no-untyped-call]


def capture(step: Step, place: tuple[torch.cuda.Stream, Any]) -> Step:
    """The step as a CUDA graph on a stream, with a pool of memory that all graphs use one after the other. Two runs
    before let kernels be compiled, and libraries take their memory."""
    graph = torch.cuda.CUDAGraph()
    stream, pool = place
    stream.wait_stream(torch.cuda.current_stream())
    try:
        with torch.cuda.stream(stream):
            step()
            step()
            # Another thread may use the device meanwhile: a trainer that updates beside rollouts.
            with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                step()
    finally:
        torch.cuda.current_stream().wait_stream(stream)
    return graph.replay
