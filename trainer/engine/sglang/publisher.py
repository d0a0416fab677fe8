"""Publishing: gives servers whole weights, or LoRA adapters alone where all of them take adapters; and restores one."""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any
from uuid import uuid4

import anyio
from torch import Tensor

from trainer.engine.base import Adapters, EngineError, PolicyWeights
from trainer.engine.sglang.http_client import REQUEST_TIMEOUT_S, ServerUnavailable
from trainer.engine.sglang.replica import CACHE_TAG, WEIGHTS_TAG, Replica, resume_memory
from trainer.engine.sglang.weight_sync.adapters import PREFIX, load_adapters, unload_adapter
from trainer.engine.sglang.weight_sync.base import NO_BASE, WeightSync, rename_tensors
from trainer.engine.sglang.weight_sync.published import PublishedWeights
from trainer.engine.sglang.weight_sync.verify import TrainerReference

log = logging.getLogger(__name__)
ATTEMPTS = 4
"""Attempts to send weights when servers are lost."""
ForEachUp = Callable[[Callable[[Replica], Coroutine[Any, Any, None]]], Coroutine[Any, Any, None]]
"""Runs an action on each server that is up, and notes those that are lost by it."""


class Publisher:
    """How weights reach the servers, and what they got last."""

    def __init__(self, weight_sync: WeightSync, reference: TrainerReference, mode: str, for_each_up: ForEachUp) -> None:
        """`mode` is how servers pause for whole weights."""
        self._weight_sync, self._mode, self._for_each_up = weight_sync, mode, for_each_up
        self._checkpoint_tensors, self._plan = reference.checkpoint_tensors, reference.adapters
        self.published = PublishedWeights(reference)
        self.uses_adapters = False
        self.merged_reason = self._plan.problem
        """Why adapters are merged, if they could have been published alone."""
        self.published_bytes = 0
        self._loaded: set[str] = set()
        """The names of adapters that servers may have."""

    def open(self, replicas: Sequence[Replica]) -> None:
        """Decides whether adapters are published alone. Raises EngineError if they have to be and cannot."""
        if self._plan.publish == "merged" or self._plan.shape is None:
            return
        self.merged_reason = self._plan.find_problem([replica.features for replica in replicas])
        self.uses_adapters = not self.merged_reason
        if self.merged_reason and self._plan.publish == "adapters":
            remedy = "remedy: correct that, or set `serving.lora: merged`"
            raise EngineError(f"`serving.lora: adapters` cannot be had: {self.merged_reason}\n  {remedy}")

    @property
    def notes(self) -> tuple[str, ...]:
        """What an operator should know."""
        return (f"gets LoRA adapters merged: {self.merged_reason}",) if self.merged_reason else ()

    def prepare(self, weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """The adapters alone, or the weights under their names in a checkpoint's files. Blocks."""
        adapters = weights.adapters() if self.uses_adapters and isinstance(weights, PolicyWeights) else None
        return rename_tensors(weights, self._checkpoint_tensors) if adapters is None else adapters

    async def send(self, weights: Mapping[str, Tensor], version: int, replicas: Sequence[Replica]) -> str:
        """Sends weights to all servers that are up; returns the name of the adapters, if they are such."""
        if not isinstance(weights, Adapters):
            await self._send_whole(weights, version, replicas)
            return ""
        name = f"{PREFIX}-{uuid4().hex[:12]}-{version}"
        self._loaded.add(name)

        async def load(replica: Replica) -> None:
            self.published_bytes = await load_adapters(replica.target, weights, name)

        await self._for_each_up(load)
        return name

    async def _send_whole(self, weights: Mapping[str, Tensor], version: int, replicas: Sequence[Replica]) -> None:
        """Sends weights while generation is paused. If a server is lost, the others get everything again; they are
        paused until then, as some of their weights may be the new ones."""
        for replica in replicas:
            if method := replica.features.quantization:
                problem = f"has weights in {method}, and would read those that are published as such"
                remedy = "for fp8 and a model of Qwen, add --load-format flash_rl; or publish LoRA adapters alone"
                raise EngineError(f"SGLang at {replica.url} {problem}\n  remedy: {remedy}")
        try:
            for attempt in range(1, ATTEMPTS + 1):
                await self._for_each_up(partial(Replica.pause, mode=self._mode))  # Also finds out which servers answer.
                try:
                    await self._send_once(weights, version, replicas)
                    return
                except ServerUnavailable:
                    if attempt == ATTEMPTS:
                        raise
        finally:
            with anyio.move_on_after(REQUEST_TIMEOUT_S, shield=True):
                await self._for_each_up(Replica.resume)

    async def _send_once(self, weights: Mapping[str, Tensor], version: int, replicas: Sequence[Replica]) -> None:
        if targets := [replica.target for replica in replicas if replica.up]:
            await self._for_each_up(lambda replica: resume_memory(replica, WEIGHTS_TAG))
            # Retracted turns keep the name of their cache, which must not hold entries of earlier weights.
            flush = self._mode == "retract"
            base, self.published.base = self.published.base, NO_BASE  # Until these are kept.
            self.published_bytes = await self._weight_sync.send(targets, weights, version, flush, base)
            await self._for_each_up(lambda replica: resume_memory(replica, CACHE_TAG))

    async def restore(self, replica: Replica) -> None:
        """Gives a server that was lost what was published last, and checks it."""
        published = self.published
        if isinstance(published.weights, Adapters):
            replica.base_version = ""
            await load_adapters(replica.target, published.weights, published.adapter)
        else:
            await resume_memory(replica, WEIGHTS_TAG)
            await self._weight_sync.send([replica.target], published.weights, published.version, False)
            await resume_memory(replica, CACHE_TAG)
        await published.verify(replica)

    def gives_up_adapters(self, error: EngineError) -> bool:
        """Whether an error makes a run publish merged weights from now on, since it may choose."""
        if not self.uses_adapters or self._plan.publish != "auto" or isinstance(error, ServerUnavailable):
            return False
        self.uses_adapters, self.merged_reason = False, str(error)
        log.warning("LoRA adapters are merged before they are published from now on: %s", error)
        return True

    async def unload_unused(self, used: set[str]) -> None:
        """Unloads adapters that neither requests nor rollouts of the current version use."""
        for name in sorted(self._loaded - used - {self.published.adapter}):
            await self._for_each_up(partial(_unload, name=name))
            self._loaded.discard(name)

    async def close(self, replicas: Sequence[Replica]) -> None:
        """Ends the transfer, and unloads adapters from servers that go on."""
        for replica in replicas:
            for name in sorted(self._loaded) if replica.up and replica.server is None else ():
                try:
                    await unload_adapter(replica.target, name)
                except EngineError:
                    break  # It is gone, or busy with what was left.
        await self._weight_sync.close()


async def _unload(replica: Replica, name: str) -> None:
    await unload_adapter(replica.target, name)
