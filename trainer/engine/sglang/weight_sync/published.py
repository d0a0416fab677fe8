"""The latest published weights, kept so that a restarted server can be given them and checked."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import anyio
from anyio import to_thread
from torch import Tensor

from trainer.engine.base import Adapters, Agreement, BucketedWeights, EngineError
from trainer.engine.host_copies import HostCopies
from trainer.engine.sglang.replica import Replica, WeightsName
from trainer.engine.sglang.weight_sync.base import NO_BASE, BaseWeights, untied_tensors
from trainer.engine.sglang.weight_sync.verify import (
    TrainerReference,
    check_agreement,
    make_probes,
    server_logprobs,
    trainer_logprobs,
)

UNPUBLISHED = -1


class PublishedWeights:
    """A copy on the CPU, as large as the weights: the trainer updates its own in place while rollouts are under way,
    and any server may come back at any time. Of weights that are spread over ranks, each keeps its own part."""

    def __init__(self, reference: TrainerReference) -> None:
        self.version = UNPUBLISHED
        self.weights: Mapping[str, Tensor] = {}
        self._copies = HostCopies()
        self.base = NO_BASE
        """The weights, if changes can be found from them."""
        self.adapter = ""
        """The name of the adapters, if these were published alone."""
        self.agreement: Agreement | None = None
        """The agreement of servers and trainer at the last publication; the worst of all servers."""
        self._compute_logprobs, self._probes = reference.compute_logprobs, make_probes(reference.image_processor)
        self._reference_logprobs: Sequence[Sequence[float]] = ()
        """The trainer's logprobs of each probe with these weights, computed before the next update."""
        self._previous_logprobs: Sequence[Sequence[float]] = ()
        """The same with the previous weights."""
        self._current = anyio.Event()
        self._current.set()

    @property
    def name(self) -> WeightsName:
        """What requests are sampled with."""
        return WeightsName(self.version, self.adapter)

    @contextmanager
    def replacing(self) -> Iterator[None]:
        """Blocks new turns during an update: they would start with the old version."""
        self._current = anyio.Event()
        try:
            yield
        finally:
            self._current.set()

    async def wait_until_current(self) -> None:
        """Waits until the version is that of the servers' weights."""
        if not self._current.is_set():
            await self._current.wait()

    async def announce(self, version: int, adapter: str) -> None:
        """Notes what servers have from now on, and computes the trainer's logprobs of the probes."""
        self.adapter = adapter
        logprobs = await to_thread.run_sync(self._compute_reference)
        self._previous_logprobs, self._reference_logprobs, self.agreement, self.version = (
            self._reference_logprobs,
            logprobs,
            None,
            version,
        )

    async def keep(self, weights: Mapping[str, Tensor]) -> None:
        """Copies the announced weights, which nobody changes meanwhile."""
        self.base = NO_BASE
        if isinstance(weights, Adapters):
            await to_thread.run_sync(self._copies.take, weights.items())
            self.weights = Adapters(weights.shape, self._copies)
        elif isinstance(weights, BucketedWeights):
            await to_thread.run_sync(weights.keep)
            self.weights = weights
        else:
            await to_thread.run_sync(self._copies.take, untied_tensors(weights))
            self.weights = self._copies
            self.base = BaseWeights(self.version, self._copies)

    async def verify(self, replica: Replica) -> None:
        """Raises EngineError if a server reports another version, or has other weights or adapters."""
        if self.adapter:
            if not await replica.has_adapter(self.adapter):
                raise EngineError(f"SGLang at {replica.url} has no adapters {self.adapter}, which were published")
        elif (version := await replica.version()) != self.version:
            raise EngineError(f"SGLang at {replica.url} has weights {version} where {self.version} were published")
        for index, trainer in enumerate(self._reference_logprobs):
            probe, before = self._probes[index], self._previous_logprobs[index] if self._previous_logprobs else None
            if probe.images and not replica.features.supports_images:
                continue  # It gets no rollouts with images either.
            server = await server_logprobs(replica.client, probe, self.adapter)
            try:
                agreement = check_agreement(replica.url, server, trainer, before, replica.features.dtype)
            except EngineError as error:
                raise EngineError(f"{error}{probe.remedy}") from error
            if self.agreement is None or self.agreement.max_difference < agreement.max_difference:
                self.agreement = agreement
        replica.base_version = await replica.weight_version() if self.adapter else ""

    def _compute_reference(self) -> list[Sequence[float]]:
        return (
            [trainer_logprobs(self._compute_logprobs, probe) for probe in self._probes]
            if self._compute_logprobs
            else []
        )
