"""A replica: one SGLang server as the engine sees it: its features, whether it answers, its requests under way.

It also releases the memory of a server on the trainer's own GPU during an update, and resumes it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any
from uuid import uuid4

import anyio
from anyio import to_thread

from gateway.types import Image
from trainer.engine.base import EngineError, Generation, OnIds, Sampling
from trainer.engine.sglang.http_client import (
    ConnectionBroken,
    RequestRefused,
    ServerUnavailable,
    SGLangClient,
    run_all,
    run_until_first,
)
from trainer.engine.sglang.request import StreamedAnswer, find_abort, generate_body, parse_generation, parse_version
from trainer.engine.sglang.server_features import ServerFeatures
from trainer.engine.sglang.server_process import ServerProcess
from trainer.engine.sglang.weight_sync.base import SyncTarget

DRAFTS = ("proposed", "correct")
WEIGHTS_TAG, CACHE_TAG = "weights", "kv_cache"
MEMORY_TIMEOUT_S = 120.0
"""Timeout for releasing memory or mapping it again."""


async def release_memory(replica: Replica) -> None:
    """Releases weights and KV cache. Generation is paused first, as a generating server would crash; its requests go
    back to the queue."""
    await replica.client.post("/pause_generation", {"mode": "retract"})
    tags = [WEIGHTS_TAG, CACHE_TAG]
    await replica.client.post("/release_memory_occupation", {"tags": tags}, within=MEMORY_TIMEOUT_S)
    replica.released = tags


async def resume_memory(replica: Replica, tag: str) -> None:
    """Maps released memory again, without its contents. Resuming what was not released would crash the server."""
    if tag in replica.released:
        await replica.client.post("/resume_memory_occupation", {"tags": [tag]}, within=MEMORY_TIMEOUT_S)
        replica.released = [item for item in replica.released if item != tag]


GENERATE_TIMEOUT_S = 3600.0
"""Timeout of one turn, pauses of the engine included; a rollout's own limits are shorter."""
ABORT_TIMEOUT_S = 5.0
EXTERNAL_RECOVERY_S = 1800.0
"""Time for a server that somebody else restarts: as long as a scheduler's job waits for servers at its start."""
HUNG_AFTER_S = 20.0
"""Time after which a running server of ours that does not answer is restarted."""
MAX_OUT_OF_MEMORY = 2
"""A server that runs out of memory this often with the same weights is not restarted."""
PREFILL_WAIT_S = 60.0
"""Time that siblings wait for the prefill of their group's prompt; after it they prefill it themselves."""
PREFILL_ONLY = Sampling(max_tokens=0)


@dataclass(frozen=True, slots=True)
class WeightsName:
    """The weights that a request is to be sampled with."""

    version: int
    adapter: str = ""
    """The name of the LoRA adapters, if these were published alone."""


@dataclass(eq=False)
class _RunningRequest:
    """A request that a server is answering."""

    rid: str
    key: str
    weights: WeightsName
    """With which it started."""


@dataclass(eq=False)
class Replica:
    """One SGLang server: features, load, requests under way, recovery."""

    client: SGLangClient
    features: ServerFeatures
    cache_namespace: str
    """Together with the version it names a prefix cache: another run's weights may have the same version."""
    server: ServerProcess | None = None
    """The process, if this engine started it and may restart it."""
    backends: tuple[SGLangClient, ...] = ()
    """Behind a router: clients of all its servers."""
    up: bool = True
    error: EngineError | None = None
    """Why it is not up."""
    released: list[str] = field(default_factory=list)
    """Tags of the memory that the trainer uses at the moment."""
    recovery_done: anyio.Event = field(default_factory=anyio.Event)
    """Set when nobody tries to recover it any more, successful or not."""
    base_version: str = ""
    """The version of the weights below the adapters, once they were found to be the trainer's."""
    drafts: Counter[str] = field(default_factory=Counter)
    """Ids that speculative decoding proposed, and how many of them were correct."""
    out_of_memory_count: int = 0
    """How often it ran out of memory with these weights."""
    _prefixes: dict[tuple[str, int], anyio.Event] = field(default_factory=dict)
    """By group and version: set when the group's prompt is in the cache."""
    _running: dict[str, _RunningRequest] = field(default_factory=dict)
    """By the id under which the request was first sent."""

    @property
    def url(self) -> str:
        return self.client.url

    @property
    def load(self) -> int:
        return len(self._running)

    @property
    def used_adapters(self) -> set[str]:
        """The adapters of requests under way."""
        return {running.weights.adapter for running in self._running.values()}

    @property
    def target(self) -> SyncTarget:
        return SyncTarget(self.client, self.features)

    async def generate(
        self,
        ids: Sequence[int],
        sampling: Sampling,
        key: str,
        weights: WeightsName,
        images: Sequence[Image],
        on_ids: OnIds | None = None,
    ) -> Generation:
        """Generates a continuation. Cancelling the call aborts the request on the server."""
        streamed = StreamedAnswer(on_ids) if on_ids else None
        rid = _request_id(key)
        running = self._running[rid] = _RunningRequest(rid, key, weights)
        cache = f"{self.cache_namespace} {weights.version}"
        body = generate_body(ids, sampling, rid, cache, images, weights.adapter)
        try:
            answer = await self._send(running, body, streamed)
            if (given_up := find_abort(answer)) is not None:
                raise ServerUnavailable(f"SGLang at {self.url} stopped generating: {given_up}")
            parse = partial(parse_generation, answer, len(ids), sampling, bool(images))
            # Experts are megabytes.
            generation = parse() if sampling.experts_from is None else await to_thread.run_sync(parse)
            for name in DRAFTS:
                self.drafts[name] += answer["meta_info"].get(f"spec_num_{name}_drafts", 0)
            return self._check_versions(running, generation)
        except RequestRefused as error:
            if weights.adapter and weights.adapter in str(error):  # A restarted server does not have them.
                problem = f"SGLang at {self.url} was restarted: it has no adapters {weights.adapter}"
                raise ServerUnavailable(problem) from error
            raise
        finally:
            del self._running[rid]

    async def prefill(
        self, ids: Sequence[int], key: str, group: str, weights: WeightsName, images: Sequence[Image]
    ) -> Generation | None:
        """Prefills a group's prompt with its first rollout while the siblings wait; otherwise the server would compute
        it once for each. Returns None for those that waited."""
        opening = self._prefixes.get((group, weights.version))
        if opening is not None:
            with anyio.move_on_after(PREFILL_WAIT_S):
                await opening.wait()
            return None
        opening = self._prefixes[group, weights.version] = anyio.Event()
        try:
            return await self.generate(ids, PREFILL_ONLY, key, weights, images)
        finally:
            opening.set()

    async def pause(self, mode: str) -> None:
        """Pauses generation; `mode` decides whether running turns keep their KV cache."""
        await self.client.post("/pause_generation", {"mode": mode})

    async def resume(self) -> None:
        """Continues generation."""
        await self.client.post("/continue_generation", {})

    def reset_prefixes(self) -> None:
        """Forgets which prompts are cached: new weights invalidate them."""
        self._prefixes.clear()
        self.out_of_memory_count = 0

    async def _send(self, running: _RunningRequest, body: Mapping[str, Any], streamed: StreamedAnswer | None) -> Any:
        """Sends the request, and once more under a new id if the connection breaks: SGLang may have received it, and
        refuses an id that is still in use."""
        try:
            return await self._request_generation(running.rid, body, streamed)
        except ConnectionBroken:
            await self._abort_request(running.rid)
            if streamed and streamed.ids:
                raise
        running.rid = _request_id(running.key)
        return await self._request_generation(running.rid, {**body, "rid": running.rid}, streamed)

    async def _request_generation(self, rid: str, body: Mapping[str, Any], streamed: StreamedAnswer | None) -> Any:
        try:
            if not streamed:
                return await self.client.post("/generate", body, within=GENERATE_TIMEOUT_S)
            body = {**body, "stream": True}
            await self.client.post_stream("/generate", body, streamed.add, within=GENERATE_TIMEOUT_S)
            return streamed.answer
        except EngineError:
            raise
        except BaseException:
            await self._abort_request(rid)
            raise

    def _check_versions(self, running: _RunningRequest, result: Generation) -> Generation:
        expected = running.weights.version
        if running.weights.adapter:  # The server's version is that of the weights below them.
            result = replace(result, version=expected, earlier_versions=())
        if result.version < expected:
            raise ServerUnavailable(
                f"SGLang at {self.url} was restarted: it has weights {result.version}, not {expected}"
            )
        before = tuple((max(version, 0), count) for version, count in result.earlier_versions)
        return replace(result, version=max(result.version, 0), earlier_versions=before)

    async def recover(self) -> None:
        """Waits until the server answers again; restarts one of ours that exited or hangs."""
        deadline = anyio.current_time() + (EXTERNAL_RECOVERY_S if self.server is None else HUNG_AFTER_S)
        while True:
            if self.server is not None and not self.server.alive:
                self.out_of_memory_count += self.server.is_out_of_memory
                if self.out_of_memory_count >= MAX_OUT_OF_MEMORY:
                    raise self.server.error("ran out of memory again")
                await self._restart(self.server)
            try:
                await self._check_alive()
                return
            except ServerUnavailable:
                if anyio.current_time() > deadline:
                    if self.server is None:
                        raise
                    await self._restart(self.server)
            await anyio.sleep(1)

    async def _restart(self, server: ServerProcess) -> None:
        """Restarts the process, which then has all of its memory."""
        await server.restart()
        self.released = []

    async def _check_alive(self) -> None:
        if self.backends:
            await self.client.get("/health")
        else:
            await self.resume()  # The trainer that paused it may be dead.

    def recovery_error(self, error: Exception) -> EngineError:
        """The error of a failed recovery, with the log of a process of ours."""
        message = f"could not be recovered: {type(error).__name__}: {error}"
        if self.server is not None and isinstance(error, ServerUnavailable):
            return self.server.error(message)
        return error if isinstance(error, EngineError) else EngineError(f"SGLang at {self.url} {message}")

    async def version(self) -> int:
        return parse_version(await self.weight_version())

    async def weight_version(self) -> str:
        """The version of the weights, or of those below the adapters."""
        return str((await self.client.get("/model_info"))["weight_version"])

    async def has_adapter(self, name: str) -> bool:
        """Whether the server has the adapters of that name."""
        return any(model.get("id") == name for model in (await self.client.get("/v1/models"))["data"])

    async def require_published(self, published: WeightsName) -> None:
        """Raises ServerUnavailable if the server does not have what was published last."""
        if published.adapter and not await self.has_adapter(published.adapter):
            raise ServerUnavailable(f"SGLang at {self.url} was restarted: it has no adapters {published.adapter}")
        if not published.adapter and (found := await self.version()) != published.version:
            why = f"it has weights {found}, not {published.version}"
            raise ServerUnavailable(f"SGLang at {self.url} was restarted: {why}")

    async def require_own_weights(self, published: int) -> None:
        """Raises EngineError if somebody else published to the server, whose weights would sample our rollouts."""
        if published < 0:
            return
        found = await self.weight_version()
        if found != self.base_version if self.base_version else parse_version(found) > published:
            raise EngineError(
                f"SGLang at {self.url} has weights {found}, but this run last published {published}: "
                "another training publishes to it\n  remedy: give each training servers of its own, and --resume"
            )

    async def _abort_request(self, rid: str) -> None:
        """Sends the abort to all servers behind a router, as nobody knows which one has the request."""
        backends = self.backends or (self.client,)
        # A server that does not answer does not generate either.
        with anyio.move_on_after(ABORT_TIMEOUT_S, shield=True), suppress(EngineError):
            await run_all(partial(client.post, "/abort_request", {"rid": rid}) for client in backends)


def _request_id(key: str) -> str:
    """A request id that is no prefix of another: SGLang aborts all requests whose ids begin with the given one."""
    return f"{key}#{uuid4().hex}"


async def wait_for_any(replicas: Sequence[Replica]) -> bool:
    """Waits until a replica is up, or until no recovery is under way any more."""
    while not any(replica.up for replica in replicas):
        mending = [replica.recovery_done for replica in replicas if not replica.recovery_done.is_set()]
        if not mending:
            return False
        await run_until_first(event.wait for event in mending)
    return True
