"""Rows come and go at every step: each owes the slab its ids without keys and values, and is sampled once it owes none.

A row that writes owes one id, the last; a new one owes what the tree of known prefixes does not have. There is no
other difference between reading a prompt and writing an answer. Rows that have the same ids so far are one lane: they
owe the same, and part where they are sampled differently. Everything here runs in one thread at a time.
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
from trainer.engine.torch.row import Decode, Lane, Row
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
        self.lanes: list[Lane] = []
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
    def rows(self) -> list[Row]:
        return [row for lane in self.lanes for row in lane.rows]

    @property
    def idle(self) -> bool:
        return not self.lanes and not self.waiting

    @torch.inference_mode()
    def advance(self) -> list[Row]:
        """Steps until a row ends; those that did."""
        until = monotonic() + SPELL_S
        ended: list[Row] = []
        while not ended and not self.idle and not self.hurry and monotonic() < until:
            self._leave()
            self._admit()
            ended = self._step() if self.lanes else []
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
        for lane in self.lanes:
            if any(chosen(row) for row in lane.rows):
                self._keep(lane, lane.held)
        self._take_out(chosen)
        waiting = [row for row in list(self.waiting) if chosen(row)]
        for row in waiting:
            self.waiting.remove(row)
        return running + waiting

    def forget(self, each: Callable[[Row], None]) -> None:
        """Gives up slab and tree; `each` says what becomes of a row that was in them, the last first."""
        self._slab.clear()
        self._empty(each)

    def _empty(self, each: Callable[[Row], None]) -> None:
        rows, self.lanes = self.rows, []
        self._tree = Tree(self._budget)
        for row in reversed(rows):
            each(row)

    def _requeue(self, row: Row) -> None:
        self.waiting.appendleft(row)

    def _leave(self) -> None:
        self._take_out(lambda row: row.left)

    def _take_out(self, chosen: Callable[[Row], bool]) -> None:
        for lane in list(self.lanes):
            lane.rows = [row for row in lane.rows if not chosen(row)]
            if not lane.rows:
                self._vacate(lane)

    def _admit(self) -> None:
        """In the order of asking, except that a row waits for a sibling which is reading what both begin with."""
        reading = [lane for lane in self.lanes if lane.reading]
        same = {tuple(lane.ids): lane for lane in self.lanes} if self.waiting else {}
        free = self._most - len(self.rows)
        for row in list(self.waiting):
            if not free:
                break
            if row.left:
                self.waiting.remove(row)
                continue
            ids = tuple(row.ids)
            known = len(ids) - 1 if ids in same else self._tree.match(ids[:-1])
            if ids not in same and any(_shares(other, row, known + SIBLING) for other in reading):
                continue
            self.waiting.remove(row)
            if ids in same:
                same[ids].rows.append(row)
            else:
                same[ids] = self._place(row)
                reading.append(same[ids])
            row.cached = known if row.cached is None else row.cached
            free -= 1

    def _place(self, row: Row) -> Lane:
        """Among the lanes first: if there is no memory for it, it must be found there and told."""
        lane = Lane(len(self.lanes), [row])
        self.lanes.append(lane)
        self._slab.reach(len(row.ids))
        if values := list(self._tree.read(row.ids[:-1])):
            known = torch.cat(values, dim=POSITIONS)
            self._slab.write(lane.slot, 0, known)
            lane.held = known.shape[POSITIONS]
        return lane

    def _step(self) -> list[Row]:
        pieces, lanes, room = [], [], AT_ONCE
        for lane in self.lanes:
            owed = lane.ids[lane.held : lane.held + room]
            if owed:
                pieces.append(Piece(lane.slot, lane.held, lane.held + len(owed), owed, lane.rows[0].sight))
                lanes.append(lane)
                room -= len(owed)
        self._slab.reach(max(piece.end for piece in pieces))
        logits = self._forward(pieces, self._slab)
        ready = []
        for index, (lane, piece) in enumerate(zip(lanes, pieces, strict=True)):
            first = lane.held < lane.asked <= piece.end
            lane.held = piece.end
            if first:
                self._keep(lane, lane.asked)
            if lane.held == len(lane.ids):
                ready.append(index)
        return self._sample([lanes[index] for index in ready], logits if len(ready) == len(lanes) else logits[ready])

    def _sample(self, lanes: list[Lane], logits: Tensor) -> list[Row]:
        if not lanes:
            return []
        rows = [row for lane in lanes for row in lane.rows]
        if len(rows) > len(lanes):
            logits = logits[[index for index, lane in enumerate(lanes) for _ in lane.rows]]
        ids, logprobs = sample(logits, [row.draw for row in rows])
        for row, token, logprob in zip(rows, ids, logprobs, strict=True):
            if not -torch.inf < logprob <= 0:
                raise EngineError(
                    f"the model's logits are not finite under version {self.version} of the weights: lower `update.lr`,"
                    " or begin with weights that are well"
                )
            row.append(token, logprob, self.version)
            row.stop = row.end(self._forward.context, self._decode)
        self._sound = True
        self._part(lanes)
        return [row for row in rows if row.stop]

    def _part(self, lanes: list[Lane]) -> None:
        """What may fail comes first, while every row is still in its lane."""
        for lane in lanes:
            if any(row.stop for row in lane.rows):
                self._keep(lane, lane.held)
        parted = [(lane, lane.parted()) for lane in lanes]
        fresh = [(lane, rows) for lane, going in parted for rows in going[1:]]
        for slot, (lane, _) in enumerate(fresh, start=len(self.lanes)):
            self._slab.move(lane.slot, slot, lane.held)
        self.lanes += [Lane(slot, rows, lane.held) for slot, (lane, rows) in enumerate(fresh, start=len(self.lanes))]
        for lane, going in parted:
            lane.rows = going[0] if going else []
            if not going:
                self._vacate(lane)

    def _keep(self, lane: Lane, length: int) -> None:
        self._tree.insert(lane.ids[:length], partial(self._slab.read, lane.slot))

    def _vacate(self, lane: Lane) -> None:
        """The last lane moves into the free slot, so that lanes stay next to each other."""
        last = self.lanes[-1]
        if last is not lane:
            self._slab.move(last.slot, lane.slot, last.held)
            last.slot = lane.slot
            self.lanes[last.slot] = last
        self.lanes.pop()


def _shares(reading: Lane, row: Row, length: int) -> bool:
    """Whether a lane will have the first `length` ids of this one in the tree, once it has read all of its own."""
    if length >= reading.asked or length >= len(row.ids) or reading.ids[length - 1] != row.ids[length - 1]:
        return False
    return reading.ids[:length] == row.ids[:length]
