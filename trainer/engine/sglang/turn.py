"""A turn takes as many requests as it takes, and may be ended in one, between two, or while it waits for weights or for
a server."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import anyio

from gateway.types import Image
from trainer.engine.base import Sampling, Written
from trainer.engine.sglang.barred import unbarred
from trainer.engine.sglang.kept import Kept
from trainer.engine.sglang.replica import Replica


@dataclass(eq=False)
class Turn:
    key: str
    kept: Kept
    aborted: bool = False
    over: anyio.Event = field(default_factory=anyio.Event)
    _patience: anyio.CancelScope | None = None

    def abort(self) -> None:
        """What a server writes at the moment is for the server to end: it has ids to give."""
        self.aborted = True
        if self._patience is not None:
            self._patience.cancel()

    @contextmanager
    def patient(self) -> Iterator[None]:
        """What is waited for within, is waited for as long as the turn is not `aborted`."""
        with anyio.CancelScope() as scope:
            if self.aborted:
                scope.cancel()
            self._patience = scope
            try:
                yield
            finally:
                self._patience = None

    async def written(
        self, replica: Replica, ids: Sequence[int], sampling: Sampling, images: Sequence[Image], opens: str
    ) -> Written:
        """`opens` is the group whose opening this may be. Where nothing keeps it, it is on its way before anybody else
        chooses: who does, sees it."""
        read = None
        with self.patient():
            read = await replica.read(ids, self.key, opens, self.kept.version, images) if opens else None

        async def write(ids: Sequence[int], sampling: Sampling) -> Written:
            with self.patient():
                await self.kept.steady()
            if self.aborted:
                return self.unwritten
            return await replica.write(ids, sampling, self.key, self.kept.version, images)

        written = await unbarred(write, ids, sampling)
        return replace(written, cached=read.cached) if read else written

    @property
    def unwritten(self) -> Written:
        return Written((), (), "abort", max(self.kept.version, 0))
