"""The embedded engine: requests arrive on the event loop, and a worker thread runs steps of the model for them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Self

import anyio
import torch
from anyio import to_thread

from gateway.types import Image
from trainer.engine.base import FEWER_SEQUENCES, Capabilities, Engine, EngineError, Generation, OnIds, Sampling
from trainer.engine.torch.choose_holding import can_decode_ahead
from trainer.engine.torch.continuous_batch import ContinuousBatch
from trainer.engine.torch.dense_model import DenseModel, DenseVisionModel, unsupported_reason
from trainer.engine.torch.kv_cache import ModelRunner
from trainer.engine.torch.sequence import Decode, SequenceState
from trainer.engine.torch.threads import choose_threads, use_threads
from trainer.engine.torch.weights import Holding
from trainer.vision.image_processor import ImageProcessor, PreparedPrompt, VisionError
from trainer.worker_thread import WorkerThread

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from transformers import PreTrainedModel

    from trainer.engine.torch.decode_ahead import DecodeAhead

STEPS_AHEAD = 8
"""Steps on a GPU between two looks of the host at what was sampled."""


def default_cache_bytes(device: str) -> int:
    """The most that the prefix cache takes. On a GPU, prompts that it has no room for would cost most of the time."""
    return 2**31 if device == "cuda" else 2**30


class TorchEngine(Engine):
    """Generates with a copy of a model's weights or, with `holding: shared`, with these themselves, on its device.

    Up to `max_sequences` are generated at once; the KV cache has room for that many of the longest one, and the prefix
    cache takes `cache_bytes` more. `decode` is needed only for stop strings, `image_processor` only for images.
    If it is `deterministic`, a sequence does not depend on those beside it to the last bit; else it is faster, and on a
    GPU, or with `steps_ahead`, decodes so many steps ahead of the host, with pages for up to `longest` ids a sequence.
    """

    def __init__(  # noqa: PLR0913 - what is chosen about an engine
        self,
        model: PreTrainedModel,
        *,
        decode: Decode | None = None,
        image_processor: ImageProcessor | None = None,
        max_sequences: int = 64,
        cache_bytes: int | None = None,
        holding: Holding = "copied",
        deterministic: bool = True,
        steps_ahead: int = 0,
        longest: int | None = None,
    ) -> None:
        reason = unsupported_reason(model)
        if reason:
            from trainer.engine.torch.hf_model import HFModel  # the few models that the engine's own layers do not fit

            self._model: ModelRunner = HFModel(model, reason)
        elif image_processor:
            self._model = DenseVisionModel(model, image_processor.family, holding, deterministic=deterministic)
        else:
            self._model = DenseModel(model, holding, deterministic=deterministic)
        self._image_processor = None if reason else image_processor
        if cache_bytes is None:
            cache_bytes = default_cache_bytes(model.device.type)
        steps = steps_ahead or (0 if model.device.type == "cpu" else STEPS_AHEAD)
        self._ahead: DecodeAhead | None = None
        if steps and isinstance(self._model, DenseModel) and can_decode_ahead(holding, deterministic=deterministic):
            from trainer.engine.torch.decode_ahead import DecodeAhead  # imports parts of torch's compiler
            from trainer.engine.torch.paged_kv_cache import PagedKVCache, plan_pages, wanted_pages

            shape, context = self._model.shape, self._model.context_length
            wanted = wanted_pages(max_sequences, min(longest or context, context) + steps)
            pages = plan_pages(shape, wanted)
            self._ahead = DecodeAhead(self._model, PagedKVCache(shape, max_sequences, pages), max_sequences, steps)
            if pages < wanted:
                self._ahead.notes = (f"has room for {pages / wanted:.0%} of its keys and values: {FEWER_SEQUENCES}",)
        self._batch = ContinuousBatch(self._model, max_sequences, cache_bytes, decode, self._ahead)
        self._decode = decode
        self._stack = AsyncExitStack()
        self._is_open = False
        self._step_lock = anyio.Lock()
        self._thread = WorkerThread("engine")
        self.threads = 1 if deterministic or model.device.type != "cpu" else choose_threads(model)
        self._has_work = anyio.Event()
        self._shares = holding == "shared" and not reason
        self._is_released = False

    @property
    def capabilities(self) -> Capabilities:
        supports_images = self._image_processor is not None
        notes = self._model.notes + (self._ahead.notes if self._ahead else ())
        return Capabilities("torch", self._model.is_exact, supports_images, self._model.context_length, notes)

    @property
    def version(self) -> int:
        return self._batch.version

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            stack.enter_context(self._thread)
            if self._ahead:
                await self._thread.run(self._ahead.prepare)
            tasks = await stack.enter_async_context(anyio.create_task_group())
            stack.callback(tasks.cancel_scope.cancel)
            self._stack = stack.pop_all()
        self._is_open = True
        tasks.start_soon(self._run)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._is_open = False
        self._batch.interrupts += 1
        try:
            await self._stack.aclose()
        finally:
            self._batch.interrupts -= 1
            self._batch.reset(self._batch.waiting.append)
            self._finish(self._batch.waiting, EngineError("the engine was closed"))
            self._batch.waiting.clear()

    async def generate(
        self,
        ids: Sequence[int],
        sampling: Sampling,
        *,
        key: str = "",
        group: str = "",
        images: Sequence[Image] = (),
        on_ids: OnIds | None = None,
    ) -> Generation:
        self._check_request(ids, sampling, images)
        if sampling.max_tokens <= 0:
            return Generation((), (), "length", self.version)
        prepared = await self._prepare_images(ids, images)
        sequence = SequenceState(list(prepared.ids if prepared else ids), sampling, key, self.version, prepared, on_ids)
        self._batch.waiting.append(sequence)
        self._has_work.set()
        try:
            await sequence.done.wait()
        finally:
            sequence.is_abandoned = True
        return sequence.generation

    @property
    def sampled_tokens(self) -> int:
        """Ids that were sampled so far, including those of generations under way."""
        return self._batch.sampled_tokens

    async def publish(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        """Running sequences prefill again, so that each logprob is exact under the version that sampled the id."""
        async with self._between_steps():
            await self._thread.run(lambda: self._batch.publish(weights, version))
        self._is_released = False
        self._has_work.set()

    async def release_memory(self) -> bool:
        """An engine that shares the trainer's weights makes no step until the next `publish`, and frees its caches."""
        if self._shares:
            self._is_released = True
            async with self._between_steps():
                await self._thread.run(self._batch.free_caches)
        return self._shares

    async def _prepare_images(self, ids: Sequence[int], images: Sequence[Image]) -> PreparedPrompt | None:
        processor = self._image_processor
        if processor is None or not (images or processor.family.image_id in ids):
            return None
        try:
            prepared = await to_thread.run_sync(processor.prepare_prompt, ids, images)
        except VisionError as error:
            raise EngineError(str(error)) from error
        self._check_length(len(prepared.ids))
        return prepared

    def _check_length(self, count: int) -> None:
        if count >= self._model.context_length:
            raise EngineError(f"{count} ids leave no room in the model's context of {self._model.context_length}")

    def _check_request(self, ids: Sequence[int], sampling: Sampling, images: Sequence[Image]) -> None:
        """Rejects requests that would fail in the middle of a step, together with the other sequences."""
        if not self._is_open:
            raise EngineError("the engine is not open; enter it with `async with` first")
        if images and self._image_processor is None:
            raise EngineError("the torch engine takes no images; use an engine that does, or tools that answer in text")
        if sampling.stop and self._decode is None:
            raise EngineError("stop strings need the engine's `decode`; give it, or stop at ids")
        if not ids:
            raise EngineError("there are no ids to continue")
        vocabulary = range(self._model.vocab_size)
        for name, checked_ids in (("ids", ids), ("banned_ids", sampling.banned_ids)):
            if checked_ids and not (min(checked_ids) in vocabulary and max(checked_ids) in vocabulary):
                raise EngineError(f"{name}: not all are below {len(vocabulary)}, the size of the model's vocabulary")
        self._check_length(len(ids))

    async def _run(self) -> None:
        while True:
            async with self._step_lock:
                self._has_work = anyio.Event()
                is_busy = not (self._is_released or self._batch.is_idle)
                if is_busy:
                    await self._run_steps()
            if not is_busy:
                await self._has_work.wait()

    async def _run_steps(self) -> None:
        try:
            finished = await self._thread.run(self._compute_steps)
            for sequence in self._batch.sequences:
                sequence.report_ids()
            self._finish(finished)
        except Exception as error:  # boundary: a model's code may raise anything; it fails the running sequences only
            engine_error = _to_engine_error(error)
            self._batch.reset(lambda sequence: self._finish([sequence], engine_error))

    def _compute_steps(self) -> list[SequenceState]:
        with use_threads(self.threads):
            return self._batch.run_steps()

    @asynccontextmanager
    async def _between_steps(self) -> AsyncIterator[None]:
        """Interrupts the steps; none runs within the block."""
        self._batch.interrupts += 1
        try:
            async with self._step_lock:
                yield
        finally:
            self._batch.interrupts -= 1

    def _finish(self, sequences: Iterable[SequenceState], error: EngineError | None = None) -> None:
        for sequence in sequences:
            sequence.report_ids()
            sequence.error = error
            sequence.done.set()


def _to_engine_error(error: Exception) -> EngineError:
    if isinstance(error, EngineError):
        return error
    engine_error = EngineError(f"the model failed in a step: {type(error).__name__}: {error}")
    if isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error):
        engine_error = EngineError(f"out of memory: {FEWER_SEQUENCES} ({error})")
    engine_error.__cause__ = error
    return engine_error
