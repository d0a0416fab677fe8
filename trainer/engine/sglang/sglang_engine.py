"""The SGLang engine: generates on one or many servers with the weights that the trainer published last."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial
from typing import TYPE_CHECKING, Any, Self
from uuid import uuid4

import anyio
from anyio import to_thread
from anyio.abc import TaskGroup

from gateway.types import Image
from trainer.engine.base import Adapters, Agreement, Capabilities, EngineError, Generation, OnIds, Sampling
from trainer.engine.sglang.generation import PendingTurn, check_request, require_version_spans
from trainer.engine.sglang.health import monitor_health, require_any
from trainer.engine.sglang.http_client import REQUEST_TIMEOUT_S, ServerTimeout, ServerUnavailable, SGLangClient, run_all
from trainer.engine.sglang.publisher import Publisher
from trainer.engine.sglang.replica import Replica, release_memory, wait_for_any
from trainer.engine.sglang.request import PngEncoder
from trainer.engine.sglang.routing import Routing, router_backends
from trainer.engine.sglang.server_features import probe_with_restarts
from trainer.engine.sglang.server_process import ServerProcess
from trainer.engine.sglang.weight_sync.base import WeightSync
from trainer.engine.sglang.weight_sync.verify import NO_REFERENCE, TrainerReference

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger(__name__)
ATTEMPTS = 4
"""Attempts to generate a turn, or to restore a server, when servers are lost."""
ROUTER_SETTLE_S = 10.0
"""Time for a server behind a router to get its weights before the router is used again."""


class SGLangEngine:
    """Generates rollouts on SGLang servers, and publishes the trainer's weights to them.

    `servers` are addresses of servers, or of one router, or processes to start; `reference` computes the logprobs
    that servers are verified with, and says whether LoRA adapters are published alone; turns under way then keep
    theirs.

    With `in_place`, turns under way keep their KV cache when weights are published; otherwise they are prefilled again.
    With `releases_memory`, the servers were started so that they can release GPU memory. With `publishes_mid_turn`,
    weights are published while turns are under way, so servers must report versions by token.
    """

    def __init__(
        self,
        servers: Sequence[str | ServerProcess],
        weight_sync: WeightSync,
        *,
        reference: TrainerReference = NO_REFERENCE,
        in_place: bool = False,
        releases_memory: bool = False,
        publishes_mid_turn: bool = False,
    ) -> None:
        self._releases_memory, self._publishes_mid_turn = releases_memory, publishes_mid_turn
        self._servers, self._stack = servers, AsyncExitStack()
        self._publisher = Publisher(weight_sync, reference, "in_place" if in_place else "retract", self._for_each_up)
        self._published = self._publisher.published
        processor = reference.image_processor
        self._image_encoder = PngEncoder(processor.fit_image) if processor else PngEncoder()
        self.replicas: list[Replica] = []
        self.router: Replica | None = None
        """The sglang-router that all requests go through, if there is one."""
        self.routing, self._lock = Routing(), anyio.Lock()
        self._servers_lost = self._restarts = 0
        self._tasks: TaskGroup | None = None

    @property
    def capabilities(self) -> Capabilities:
        if not self.replicas:
            raise EngineError("the engine is not open; enter it with `async with` first")
        features = [replica.features for replica in self.replicas]
        count = f" x {len(features)}" if len(features) > 1 else ""
        return Capabilities(
            features[0].name + count + (" behind a router" if self.router else ""),
            is_exact=self.agreement is not None and self.agreement.is_exact,
            supports_images=all(item.supports_images for item in features),
            context_length=min(item.context for item in features),
            notes=tuple(sorted({note for item in features for note in item.notes})) + self._publisher.notes,
            tells_experts=all(item.tells_experts for item in features),
            takes_adapters=self._publisher.uses_adapters,
        )

    @property
    def version(self) -> int:
        """-1 until weights are published: what a server was started with has no version."""
        return self._published.version

    @property
    def published_bytes(self) -> int:
        return self._publisher.published_bytes

    @property
    def agreement(self) -> Agreement | None:
        """The agreement of servers and trainer at the last publication; the worst of all servers."""
        return self._published.agreement

    @property
    def counters(self) -> Mapping[str, float]:
        """Requests by routing reason and by server, how many servers were lost, and came back, and what speculative
        decoding proposed."""
        drafts = sum((replica.drafts for replica in self._request_targets), Counter[str]())
        lost = {"servers_lost": self._servers_lost, "restarts": self._restarts}
        return self.routing.metrics | lost | {f"drafts/{name}": count for name, count in drafts.items()}

    async def __aenter__(self) -> Self:
        cache = uuid4().hex
        async with AsyncExitStack() as stack:
            for server in self._servers:
                process = None if isinstance(server, str) else await stack.enter_async_context(server)
                client = await stack.enter_async_context(SGLangClient(process.url if process else str(server)))
                urls = () if process else await router_backends(client)
                if urls and len(self._servers) > 1:
                    raise EngineError(f"{client.url} is a router: name it alone, or the servers {', '.join(urls)}")
                clients = [await stack.enter_async_context(SGLangClient(url)) for url in urls] or [client]
                for item in clients:
                    self.replicas.append(Replica(item, await probe_with_restarts(item, process), cache, process))
                if urls:
                    self.router = Replica(client, self.replicas[0].features, cache, backends=tuple(clients))
            self._publisher.open(self.replicas)
            if self._publishes_mid_turn and not self._publisher.uses_adapters:
                require_version_spans(self.replicas)
            stack.push_async_callback(self._close_weight_sync)
            self._tasks = await stack.enter_async_context(anyio.create_task_group())
            stack.callback(self._tasks.cancel_scope.cancel)
            for replica in self.replicas:
                self._tasks.start_soon(monitor_health, replica, partial(self._is_generating, replica), self._on_lost)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()
        self.replicas, self.router = [], None

    async def _close_weight_sync(self) -> None:
        with anyio.move_on_after(REQUEST_TIMEOUT_S, shield=True):
            await self._publisher.close(self.replicas)

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
        """Generates a turn. If a server fails, the turn starts again elsewhere, unless its part was seen."""
        check_request(ids, sampling, images, self.capabilities, [replica.features for replica in self.replicas])
        if sampling.max_tokens <= 0:
            return Generation((), (), "length", max(self.version, 0))
        turn = PendingTurn(key, self._published, on_ids, sampling.banned_ids)
        return await self._generate(turn, ids, sampling, group, await self._image_encoder.encode(images))

    async def _generate(
        self, turn: PendingTurn, ids: Sequence[int], sampling: Sampling, group: str, images: Sequence[Image]
    ) -> Generation:
        prefix_group = group if turn.key and not self.routing.knows(turn.key) else ""
        for attempt in range(1, ATTEMPTS + 1):
            await self._wait_for_server()
            replica = self._choose(turn.key, group)
            try:
                return await turn.generate(replica, ids, sampling, images, prefix_group)
            except ServerUnavailable as error:
                self._on_lost(replica, error)
                if attempt == ATTEMPTS or turn.is_seen:
                    raise replica.error or error from error
        raise AssertionError("unreachable")

    def _choose(self, key: str, group: str) -> Replica:
        up = [index for index, replica in enumerate(self._request_targets) if replica.up]
        loads = [replica.load for replica in self._request_targets]
        return self._request_targets[self.routing.choose(key, group, loads, up)]

    @property
    def _request_targets(self) -> list[Replica]:
        return [self.router] if self.router else self.replicas

    def _is_generating(self, replica: Replica) -> bool:
        return (self.router or replica).load > 0 and not self._lock.locked()

    def _on_lost(self, replica: Replica, error: EngineError) -> None:
        """Marks a replica as down and starts its recovery; the others continue."""
        if not replica.up or self._tasks is None:
            return
        if isinstance(error, ServerTimeout):
            replica.client.cancel_waiting(str(error))
        if replica.server is not None and (replica.server.is_out_of_memory or not replica.server.alive):
            error = replica.server.error("is lost")
        log.warning("%s", error)
        replica.up, replica.error, replica.recovery_done = False, error, anyio.Event()
        self._servers_lost += replica is not self.router
        self._tasks.start_soon(self._recover, replica)
        if self.router and replica is not self.router:  # Requests at the router may wait for this server.
            self._on_lost(self.router, error)
            self.router.client.cancel_waiting(str(error))

    async def _recover(self, replica: Replica) -> None:
        try:
            for attempt in range(1, ATTEMPTS + 1):
                await replica.recover()
                try:
                    await (self._restore_router() if replica is self.router else self._restore(replica))
                    break
                except ServerUnavailable:  # Lost again while it got the weights.
                    if attempt == ATTEMPTS:
                        raise
            log.warning("SGLang at %s is back", replica.url)
            self._restarts += replica is not self.router
        except (EngineError, TimeoutError, RuntimeError, OSError) as error:
            replica.error = replica.recovery_error(error)
        finally:
            replica.recovery_done.set()

    async def _restore(self, replica: Replica) -> None:
        async with self._lock:
            if self._published.weights:
                await self._publisher.restore(replica)
            replica.up, replica.error = True, None

    async def _restore_router(self) -> None:
        """Checks all servers behind the router, which does not say who failed, and restores those with old weights."""
        if self._published.weights:
            await self._for_each_up(partial(Replica.require_published, published=self._published.name))
        with anyio.move_on_after(ROUTER_SETTLE_S):
            for replica in self.replicas:
                if not replica.up:
                    await replica.recovery_done.wait()
        await wait_for_any(self.replicas)
        if not self._replicas_up or self.router is None:
            raise EngineError(str(self.replicas[0].error))
        self.router.up, self.router.error = True, None

    async def _wait_for_server(self) -> None:
        """Waits until a server is up and has the current weights; raises the reason if none comes back."""
        while True:
            await self._published.wait_until_current()
            if any(replica.up for replica in self._request_targets):
                return
            await require_any(self._request_targets)

    async def publish(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Publishes weights to all servers; raises EngineError where a server's version or logprobs do not match."""
        async with self._lock:
            with self._published.replacing():
                try:
                    sent = await self._replace_weights(weights, version)
                except EngineError as error:
                    if not self._publisher.gives_up_adapters(error):
                        raise
                    for replica in self._request_targets:
                        replica.client.cancel_waiting(str(error))  # Their adapters are for other weights.
                    sent = await self._replace_weights(weights, version)
            await self._published.keep(sent)  # New turns need not wait for the copy; a lost server does.
            used = set[str]().union(*(replica.used_adapters for replica in self._request_targets))
            await self._publisher.unload_unused(used)
        for replica in (*self.replicas, *self._request_targets):
            if not replica.up and replica.recovery_done.is_set():
                replica.up = True
                self._on_lost(replica, replica.error or EngineError("it did not answer"))  # One more attempt.
        await self._wait_for_server()

    async def _replace_weights(self, weights: Mapping[str, Tensor], version: int) -> Mapping[str, Tensor]:
        """Returns what was sent: the adapters alone, or the weights under their names in a checkpoint's files."""
        weights = await to_thread.run_sync(self._publisher.prepare, weights)
        is_loaded = any(replica.load for replica in self._request_targets)
        if is_loaded and not isinstance(weights, Adapters):
            require_version_spans(self.replicas)
        await self._for_each_up(partial(Replica.require_own_weights, published=self.version))
        adapter = await self._publisher.send(weights, version, self.replicas)
        await self._published.announce(version, adapter)
        self.routing.forget()
        for replica in {*self.replicas, *self._request_targets}:
            replica.reset_prefixes()
        await self._for_each_up(self._published.verify)
        return weights

    @property
    def _replicas_up(self) -> list[Replica]:
        return [replica for replica in self.replicas if replica.up]

    async def release_memory(self) -> bool:
        if self._releases_memory:
            async with self._lock:
                await self._for_each_up(release_memory)
        return self._releases_memory

    async def _for_each_up(self, action: Callable[[Replica], Coroutine[Any, Any, None]]) -> None:
        async def guarded(replica: Replica) -> None:
            try:
                await action(replica)
            except ServerUnavailable as error:
                self._on_lost(replica, error)

        await run_all(partial(guarded, replica) for replica in self._replicas_up)
