"""Rows come and go at every step: each owes the slab its ids without keys and values, and is sampled once it owes none.

A row that writes owes one id, the last; a new one owes what the tree of known prefixes does not have. There is no
other difference between reading a prompt and writing an answer. Everything here runs in one thread at a time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from time import monotonic

import torch
from torch import Tensor

from trainer.engine.base import EngineError
from trainer.engine.torch.forward import Forward, Piece
from trainer.engine.torch.row import Decode, Row
from trainer.engine.torch.sample import sample
from trainer.engine.torch.slab import Slab
from trainer.engine.torch.tree import POSITIONS, Tree

AT_ONCE = 512
"""Ids in one step, so that a long prompt holds up those who write for a short while only."""
SPELL_S = 0.02
"""How long steps may go on before whoever waits for one of its rows, or to change something, is let in."""
SIBLING = 16
"""A row waits if another is reading at least so many ids that it could use."""


class Batch:
    def __init__(self, forward: Forward, rows: int, cache_bytes: int, decode: Decode | None) -> None:
        self.version = 0
        self.waiting: deque[Row] = deque()
        self.rows: list[Row] = []
        """Each at the index of its slot."""
        self.hurry = 0
        """How many want in between two steps."""
        self._forward = forward
        self._most = rows
        self._decode = decode
        self._budget = cache_bytes // forward.shape.bytes
        self._tree = Tree(self._budget)
        self._slab = Slab(forward.shape, rows)
        self._sound = False
        """These weights were sampled from: what they leave in the slab are numbers, which the next need not clear."""

    @property
    def idle(self) -> bool:
        return not self.rows and not self.waiting

    @torch.inference_mode()
    def advance(self) -> list[Row]:
        """Steps until a row ends; those that did."""
        until = monotonic() + SPELL_S
        ended: list[Row] = []
        while not ended and not self.idle and not self.hurry and monotonic() < until:
            self._leave()
            self._admit()
            ended = self._step() if self.rows else []
        return ended

    @torch.inference_mode()
    def publish(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Keys and values of the old weights are forgotten, and rows that were being written read their ids again."""
        self._forward.take(weights)
        self.version = version
        if not self._sound:
            self._slab.clear()
        self._sound = False
        self._empty(self._requeue)

    @torch.inference_mode()
    def drop(self, chosen: Callable[[Row], bool]) -> list[Row]:
        """Takes rows out, wherever they are. What they have is kept, as someone may go on from there."""
        running = [row for row in self.rows if chosen(row)]
        for row in running:
            self._keep(row, row.held)
            self._vacate(row)
        waiting = [row for row in list(self.waiting) if chosen(row)]
        for row in waiting:
            self.waiting.remove(row)
        return running + waiting

    def forget(self, each: Callable[[Row], None]) -> None:
        """Gives up slab and tree; `each` says what becomes of a row that was in them, the last first."""
        self._slab.clear()
        self._empty(each)

    def _empty(self, each: Callable[[Row], None]) -> None:
        rows, self.rows = self.rows, []
        self._tree = Tree(self._budget)
        for row in reversed(rows):
            each(row)

    def _requeue(self, row: Row) -> None:
        row.slot, row.held = -1, 0
        self.waiting.appendleft(row)

    def _leave(self) -> None:
        for row in [row for row in self.rows if row.left]:
            self._vacate(row)

    def _admit(self) -> None:
        """In the order of asking, except that a row waits for a sibling which is reading what both begin with."""
        reading = [row for row in self.rows if row.held < row.asked]
        for row in list(self.waiting):
            if len(self.rows) == self._most:
                break
            known = 0 if row.left else self._tree.match(row.ids[:-1])
            if not any(_shares(other, row, known + SIBLING) for other in reading):
                self.waiting.remove(row)
                if not row.left:
                    self._place(row, known)
                    reading.append(row)

    def _place(self, row: Row, known: int) -> None:
        """Among the rows first: if there is no memory for it, it must be found there and told."""
        row.slot = len(self.rows)
        self.rows.append(row)
        self._slab.reach(len(row.ids))
        if values := list(self._tree.read(row.ids[:-1])):
            self._slab.write(row.slot, 0, torch.cat(values, dim=POSITIONS))
            row.held = known
        row.cached = known if row.cached is None else row.cached

    def _step(self) -> list[Row]:
        pieces, rows, room = [], [], AT_ONCE
        for row in self.rows:
            owed = row.ids[row.held : row.held + room]
            if owed:
                pieces.append(Piece(row.slot, row.held, row.held + len(owed), owed))
                rows.append(row)
                room -= len(owed)
        self._slab.reach(max(piece.end for piece in pieces))
        logits = self._forward(pieces, self._slab)
        ready = []
        for index, (row, piece) in enumerate(zip(rows, pieces, strict=True)):
            first = row.held < row.asked <= piece.end
            row.held = piece.end
            if first:
                self._keep(row, row.asked)
            if row.held == len(row.ids):
                ready.append(index)
        return self._sample([rows[index] for index in ready], logits if len(ready) == len(rows) else logits[ready])

    def _sample(self, rows: list[Row], logits: Tensor) -> list[Row]:
        if not rows:
            return []
        ended = []
        ids, logprobs = sample(logits, [row.draw for row in rows])
        for row, token, logprob in zip(rows, ids, logprobs, strict=True):
            if not -torch.inf < logprob <= 0:
                raise EngineError(
                    f"the model's logits are not finite under version {self.version} of the weights: lower `update.lr`,"
                    " or begin with weights that are well"
                )
            row.append(token, logprob, self.version)
            row.stop = row.end(self._forward.context, self._decode)
            if row.stop:
                ended.append(row)
        self._sound = True
        for row in ended:
            self._keep(row, row.held)
        for row in ended:
            self._vacate(row)
        return ended

    def _keep(self, row: Row, length: int) -> None:
        self._tree.insert(row.ids[:length], partial(self._slab.read, row.slot))

    def _vacate(self, row: Row) -> None:
        """The last row moves into the free slot, so that rows stay next to each other."""
        last = self.rows.pop()
        if last is not row:
            self._slab.move(last.slot, row.slot, last.held)
            last.slot = row.slot
            self.rows[last.slot] = last


def _shares(reading: Row, row: Row, length: int) -> bool:
    """Whether another row will have the first `length` ids of this one in the tree, once it has read all of its own."""
    if length >= reading.asked or length >= len(row.ids) or reading.ids[length - 1] != row.ids[length - 1]:
        return False
    return reading.ids[:length] == row.ids[:length]
