"""A row is one request on its way: what was asked, what is written so far, and how it ends. Equal rows are a lane."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import anyio

from trainer.engine.base import EngineError, Sampling, Stop, Written
from trainer.engine.torch.sample import Draw
from trainer.vision.eyes import Sight

Decode = Callable[[Sequence[int]], str]
SLACK = 8
"""Ids that say nothing, as special ones, may stand between those that spell a stop string."""


@dataclass(eq=False, slots=True)
class Row:
    ids: list[int]
    """Asked, then written."""
    sampling: Sampling
    key: str
    version: int
    sight: Sight | None = None
    """Where the ids have pictures among them, each by its name."""
    asked: int = 0
    seed: int = 0
    logprobs: list[float] = field(default_factory=list)
    before: list[tuple[int, int]] = field(default_factory=list)
    """The versions that sampled the first ids, each with how many."""
    cached: int | None = None
    stop: Stop | None = None
    error: EngineError | None = None
    left: bool = False
    """Nobody waits for it any more."""
    done: anyio.Event = field(default_factory=anyio.Event)

    def __post_init__(self) -> None:
        self.asked = len(self.ids)
        self.seed = secrets.randbits(64) if self.sampling.seed is None else self.sampling.seed

    @property
    def draw(self) -> Draw:
        return Draw(self.sampling, self.seed, len(self.ids))

    @property
    def written(self) -> Written:
        if self.error:
            raise EngineError(str(self.error)) from self.error
        ids = tuple(self.ids[self.asked :])
        stop, cached, before = self.stop or "abort", self.cached or 0, tuple(self.before)
        return Written(ids, tuple(self.logprobs), stop, self.version, cached, before, read=self.asked)

    def append(self, token: int, logprob: float, version: int) -> None:
        if version != self.version:
            self._turn(version)
        self.ids.append(token)
        self.logprobs.append(logprob)

    def _turn(self, version: int) -> None:
        """New weights write from here on."""
        if count := len(self.logprobs) - sum(count for _, count in self.before):
            self.before.append((self.version, count))
        self.version = version

    def end(self, context: int, decode: Decode | None) -> Stop | None:
        """Whether what was just written ends the turn."""
        sampling = self.sampling
        if self.ids[-1] in sampling.stop_ids or (sampling.stop and decode and self._says(sampling.stop, decode)):
            return "stop"
        if len(self.logprobs) >= sampling.max_tokens or len(self.ids) >= context:
            return "length"
        return None

    def _says(self, stops: Sequence[str], decode: Decode) -> bool:
        """An id says at least a byte, so the tail that can spell a stop string is short, and only it is decoded."""
        longest = max(len(stop.encode()) for stop in stops) + SLACK
        text = decode(self.ids[max(self.asked, len(self.ids) - longest) :])
        return any(stop in text for stop in stops)


@dataclass(eq=False, slots=True)
class Lane:
    """Rows that have the same ids so far, as siblings have for long: what one of them owes is read for all."""

    slot: int
    rows: list[Row]
    held: int = 0
    """Of the ids, how many have keys and values in the slot."""

    @property
    def ids(self) -> list[int]:
        return self.rows[0].ids

    @property
    def asked(self) -> int:
        return self.rows[0].asked

    @property
    def reading(self) -> bool:
        return self.held < self.asked

    def parted(self) -> list[list[Row]]:
        """Those that go on, by the id that each has just written."""
        going: dict[int, list[Row]] = {}
        for row in self.rows:
            if not row.stop:
                going.setdefault(row.ids[-1], []).append(row)
        return list(going.values())
