"""What was published last is kept until the next time: a server that comes back is given that, and held against it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import anyio
import torch
from anyio import to_thread
from torch import Tensor

from trainer.engine.base import Agreement, EngineError
from trainer.engine.sglang.agree import agreed
from trainer.engine.sglang.finding import finding, found, probes
from trainer.engine.sglang.own import Own
from trainer.engine.sglang.publish.way import distinct
from trainer.engine.sglang.replica import Replica

UNPUBLISHED = -1


class Kept:
    """A trainer that learns while rollouts are written moves the weights that it published, in place. So a copy is
    kept, in the memory of the CPU: as many bytes as the weights have, since any server may come back at any time."""

    def __init__(self, own: Own) -> None:
        self.version = UNPUBLISHED
        self.weights: dict[str, Tensor] = {}
        self.agreement: Agreement | None = None
        """Between the servers and the trainer, when weights were last published; the worst of all."""
        self._finds, self._probes = own.finds, probes(own.eyes)
        self._found: Sequence[Sequence[float]] = ()
        """By the trainer, of each probe, of these weights: what it reads later is of others."""
        self._before: Sequence[Sequence[float]] = ()
        """Of the weights before these."""
        self._steady = anyio.Event()
        self._steady.set()

    @contextmanager
    def changing(self) -> Iterator[None]:
        """While others are sent, a turn begun would be asked for under the version before."""
        self._steady = anyio.Event()
        try:
            yield
        finally:
            self._steady.set()

    async def steady(self) -> None:
        """Until the version is that of the weights that there are."""
        if not self._steady.is_set():
            await self._steady.wait()

    async def take(self, weights: Mapping[str, Tensor], version: int) -> None:
        """While nobody moves them."""
        await to_thread.run_sync(self._copy, distinct(weights))
        own = await to_thread.run_sync(self._own)
        self._before, self._found, self.agreement, self.version = self._found, own, None, version

    def _copy(self, given: Sequence[tuple[str, Tensor]]) -> None:
        """Over the copy that there is, where it has room: two of them would be needed at once otherwise."""
        kept, self.weights = self.weights, {}
        with torch.no_grad():
            for name, tensor in given:
                room = kept.get(name)
                fits = room is not None and room.shape == tensor.shape and room.dtype == tensor.dtype
                self.weights[name] = room.copy_(tensor) if room is not None and fits else _copied(tensor)

    async def held(self, replica: Replica) -> None:
        """Raises where it has other weights, or tells another version."""
        if (version := await replica.version()) != self.version:
            raise EngineError(f"SGLang at {replica.url} has weights {version} where {self.version} were published")
        for place, own in enumerate(self._found):
            probe, before = self._probes[place], self._before[place] if self._before else None
            if probe.images and not replica.facts.images:
                continue  # It is asked to continue none, either.
            its = await finding(replica.wire, probe)
            try:
                one = agreed(replica.url, its, own, before, replica.facts.dtype)
            except EngineError as error:
                raise EngineError(f"{error}{probe.remedy}") from error
            if self.agreement is None or self.agreement.most < one.most:
                self.agreement = one

    def _own(self) -> list[Sequence[float]]:
        return [found(self._finds, probe) for probe in self._probes] if self._finds else []


def _copied(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)
