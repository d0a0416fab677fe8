"""An engine continues token ids; whoever holds the ledger decides what they mean."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from types import TracebackType
from typing import TYPE_CHECKING, Literal, Protocol, Self

from gateway.types import Image
from trainer.ledger import Spells

if TYPE_CHECKING:
    import torch

Stop = Literal["stop", "length", "abort"]


EXACT = 1e-4
"""Nats; what is nearer, differs by rounding alone."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to continue. The defaults sample from the policy as it is, which is what its gradient assumes."""

    max_tokens: int = 512
    temperature: float = 1.0
    """0 takes the likeliest token."""
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps every token."""
    min_p: float = 0.0
    stop_ids: tuple[int, ...] = ()
    """Sampling one of these ends the turn; it belongs to what was written."""
    stop: tuple[str, ...] = ()
    """Writing one of these ends the turn, at the token that completes it."""
    barred: tuple[int, ...] = ()
    """Never sampled: ids with a meaning that the policy cannot give, as an image's place without an image."""
    seed: int | None = None
    """The same ids, weights and seed give the same continuation, whatever else is in the batch."""


@dataclass(frozen=True, slots=True)
class Written:
    """What an engine wrote: sampled ids with the logprob that each had when it was sampled."""

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Under the policy's own distribution: temperature included, filters (top-p, top-k, min-p) not."""
    stop: Stop
    version: int = 0
    """Of the weights that sampled the last id."""
    cached: int = 0
    """Of the ids that were asked to be continued, how many needed no work."""
    before: Spells = ()
    """Where weights changed on the way: the versions that sampled the first ids, each with how many."""
    read: int | None = None
    """The ids that were asked to be continued, as the engine counts them: images as wide as it sees them."""

    @property
    def versions(self) -> tuple[int, ...]:
        """Of each id."""
        known = tuple(chain.from_iterable((version,) * count for version, count in self.before))
        return known + (self.version,) * (len(self.ids) - len(known))


@dataclass(frozen=True, slots=True)
class Capabilities:
    name: str
    exact: bool
    """Logprobs equal those that the trainer computes from the same weights, to float rounding."""
    images: bool = False
    context: int = 0
    """The longest sequence it can hold."""
    notes: tuple[str, ...] = ()
    """What is not as one would expect, for whoever runs it: printed and recorded."""


@dataclass(frozen=True, slots=True)
class Agreement:
    """How far an engine's logprobs of some ids are from the trainer's, both with the same weights."""

    most: float
    mean: float

    @property
    def exact(self) -> bool:
        return self.most <= EXACT

    @property
    def told(self) -> dict[str, float]:
        return {"agreement/max": self.most, "agreement/mean": self.mean}


class EngineError(Exception):
    """The engine failed, not the policy: the rollout ends with its own stop reason and is never scored."""


class Engine(Protocol):
    """Entered and left by one task; `generate` is called from any."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None: ...

    @property
    def capabilities(self) -> Capabilities: ...

    @property
    def version(self) -> int:
        """Of the weights that it writes with; -1 where nobody has published to servers that came with theirs."""
        ...

    @property
    def counted(self) -> Mapping[str, float]:
        """What has happened at its servers since it was opened, by name; nothing, where it has none."""
        ...

    @property
    def agreement(self) -> Agreement | None:
        """With the trainer, when weights were last published. Nobody asks an engine that reads with the same code."""
        ...

    async def generate(
        self, ids: Sequence[int], sampling: Sampling, *, key: str = "", group: str = "", images: Sequence[Image] = ()
    ) -> Written:
        """Continues `ids`. `key` names the rollout and `group` its siblings; cancelling frees its place."""
        ...

    async def publish(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        """New weights. What is being written goes on under them, and says so by its version."""
        ...

    async def lend(self) -> bool:
        """Lends its memory to the trainer until weights are published, where it is made to; whether it did. Nobody may
        write meanwhile."""
        ...

    async def pause(self) -> None:
        """Nothing more is sampled until `resume`; what was being written waits."""
        ...

    async def resume(self) -> None: ...

    async def abort(self, key: str = "") -> None:
        """Ends what is being written for one rollout, or for all: each gets what it has, with stop `abort`."""
        ...
