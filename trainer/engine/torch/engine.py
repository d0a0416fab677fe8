"""Requests come and go on the event loop, steps run in a thread, and between two of them anyone may cut in."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Self, TypeVar

import anyio
import torch
from anyio import to_thread

from gateway.types import Image
from trainer.engine.base import Agreement, Capabilities, EngineError, Sampling, Written
from trainer.engine.torch.batch import Batch
from trainer.engine.torch.dense import Dense, unfit
from trainer.engine.torch.module import Module
from trainer.engine.torch.row import Decode, Row
from trainer.engine.torch.seeing import Seeing
from trainer.thread import OwnThread
from trainer.vision.eyes import Eyes, Sight, SightError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from transformers import PreTrainedModel

Result = TypeVar("Result")


class TorchEngine:
    """Writes with a copy of a model's weights, on the device that the model is on.

    `rows` are written at once, and their keys and values need room for as many times the longest of them; known
    prefixes are kept in `cache_bytes` besides. `decode` is needed for stop strings only, `eyes` for images.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        decode: Decode | None = None,
        eyes: Eyes | None = None,
        rows: int = 64,
        cache_bytes: int = 2**30,
    ) -> None:
        why = unfit(model)
        self._forward = Module(model, why) if why else Seeing(model, eyes.family) if eyes else Dense(model)
        self._eyes = None if why else eyes
        self._batch = Batch(self._forward, rows, cache_bytes, decode)
        self._decode = decode
        self._stack = AsyncExitStack()
        self._open = False
        self._between = anyio.Lock()
        self._thread = OwnThread("engine")
        self._work = anyio.Event()
        self._paused = False

    @property
    def capabilities(self) -> Capabilities:
        exact = self._forward.shape.dtype is torch.float32
        sees = self._eyes is not None
        return Capabilities("torch", exact, sees, self._forward.context, self._forward.notes)

    @property
    def version(self) -> int:
        return self._batch.version

    async def __aenter__(self) -> Self:
        self._stack.enter_context(self._thread)
        tasks = await self._stack.enter_async_context(anyio.create_task_group())
        self._stack.callback(tasks.cancel_scope.cancel)
        self._open = True
        tasks.start_soon(self._run)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open = False
        self._batch.hurry += 1
        try:
            await self._stack.aclose()
        finally:
            self._batch.hurry -= 1
            self._batch.forget(self._batch.waiting.append)
            self._settle(self._batch.waiting, EngineError("the engine was closed"))
            self._batch.waiting.clear()

    async def generate(
        self, ids: Sequence[int], sampling: Sampling, *, key: str = "", group: str = "", images: Sequence[Image] = ()
    ) -> Written:
        self._check(ids, sampling, images)
        if sampling.max_tokens <= 0:
            return Written((), (), "length", self.version)
        sight = await self._sight(ids, images)
        row = Row(list(sight.ids if sight else ids), sampling, key, self.version, sight)
        self._batch.waiting.append(row)
        self._work.set()
        try:
            await row.done.wait()
        finally:
            row.left = True
        return row.written

    @property
    def counted(self) -> Mapping[str, float]:
        return {}

    @property
    def agreement(self) -> Agreement | None:
        return None

    async def publish(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        """What is being written reads its ids again, so that a logprob is exact under the version that sampled it."""
        async with self._cut_in():
            await self._thread.run(lambda: self._batch.publish(weights, version))

    async def lend(self) -> bool:
        """It shares the trainer's process, and keeps what it has."""
        return False

    async def pause(self) -> None:
        self._paused = True
        async with self._cut_in():
            pass

    async def resume(self) -> None:
        self._paused = False
        self._work.set()

    async def abort(self, key: str = "") -> None:
        async with self._cut_in():
            self._settle(await self._thread.run(lambda: self._batch.drop(lambda row: not key or row.key == key)))

    async def _sight(self, ids: Sequence[int], images: Sequence[Image]) -> Sight | None:
        eyes = self._eyes
        if eyes is None or not (images or eyes.family.image in ids):
            return None
        try:
            sight = await to_thread.run_sync(eyes.sight, ids, images)
        except SightError as error:
            raise EngineError(str(error)) from error
        self._fits(len(sight.ids))
        return sight

    def _fits(self, count: int) -> None:
        if count >= self._forward.context:
            raise EngineError(f"{count} ids leave no room in the model's context of {self._forward.context}")

    def _check(self, ids: Sequence[int], sampling: Sampling, images: Sequence[Image]) -> None:
        """What would otherwise fail in the midst of a step, and take its neighbours along."""
        if not self._open:
            raise EngineError("the engine is not open; enter it with `async with` first")
        if images and self._eyes is None:
            raise EngineError("the torch engine takes no images; use an engine that does, or tools that answer in text")
        if sampling.stop and self._decode is None:
            raise EngineError("stop strings need the engine's `decode`; give it, or stop at ids")
        if not ids:
            raise EngineError("there are no ids to continue")
        known = range(self._forward.vocabulary)
        for name, some in (("ids", ids), ("barred", sampling.barred)):
            if some and not (min(some) in known and max(some) in known):
                raise EngineError(f"{name}: not all below {len(known)}, which is the size of the model's vocabulary")
        self._fits(len(ids))

    async def _run(self) -> None:
        while True:
            async with self._between:
                self._work = anyio.Event()
                busy = not self._paused and not self._batch.idle
                if busy:
                    await self._spell()
            if not busy:
                await self._work.wait()

    async def _spell(self) -> None:
        try:
            self._settle(await self._thread.run(self._batch.advance))
        except Exception as error:  # a model's code may raise anything: it ends the rows in the step, not the engine
            reason = _reason(error)
            self._batch.forget(lambda row: self._settle([row], reason))

    @asynccontextmanager
    async def _cut_in(self) -> AsyncIterator[None]:
        """Between two steps, with nothing on its way."""
        self._batch.hurry += 1
        try:
            async with self._between:
                yield
        finally:
            self._batch.hurry -= 1

    def _settle(self, rows: Iterable[Row], error: EngineError | None = None) -> None:
        for row in rows:
            row.error = error
            row.done.set()


def _reason(error: Exception) -> EngineError:
    if isinstance(error, EngineError):
        return error
    reason = EngineError(f"the model failed in a step: {type(error).__name__}: {error}")
    if isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error):
        reason = EngineError(f"out of memory: lower the engine's `rows` or `cache_bytes` ({error})")
    reason.__cause__ = error
    return reason
