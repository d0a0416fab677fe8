"""Packs a rank's share of rows into micro-batches. All ranks get the same number: they make their passes together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trainer.algorithms.packing import Batch, BatchRow, pack
from trainer.policy.deal_rows import DealtRows, deal_rows
from trainer.policy.microbatch import split_micro_batches
from trainer.policy.ranks import Ranks

PADDING_ROW = BatchRow("padding", (0, 0), (False, False), (0.0, 0.0), (0.0, 0.0), (0.0, 0.0))
"""A row without trained tokens, for a rank that has fewer micro-batches than another: its gradient is 0."""


@dataclass(frozen=True, slots=True)
class DealtBatch:
    """A micro-batch of a rank."""

    batch: Batch
    indexes: tuple[int, ...]
    """Which of the rows it has; none if it is padding."""


def deal_batches(rows: Sequence[BatchRow], ranks: Ranks, max_tokens: int) -> tuple[list[DealtBatch], DealtRows]:
    """This rank's micro-batches, and the shares of all ranks."""
    dealt = deal_rows([row.ids for row in rows], [row.group for row in rows], ranks.shares)
    parts = [list(split_micro_batches([len(rows[index].ids) for index in share], max_tokens)) for share in dealt.shares]
    own = dealt.shares[ranks.share]
    batches = [DealtBatch(pack([rows[index] for index in own[part]]), tuple(own[part])) for part in parts[ranks.share]]
    missing = max(map(len, parts)) - len(batches)
    return batches + [DealtBatch(pack([PADDING_ROW]), ())] * missing, dealt
