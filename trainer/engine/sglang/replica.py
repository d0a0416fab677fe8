"""A replica is one server as the engine sees it: what it is, whether it answers, and how much it writes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any
from uuid import uuid4

import anyio

from gateway.types import Image
from trainer.engine.base import EngineError, Sampling, Written
from trainer.engine.sglang.probe import Facts
from trainer.engine.sglang.publish.way import Target
from trainer.engine.sglang.request import asked, numbered, written
from trainer.engine.sglang.server import Server
from trainer.engine.sglang.together import first, together
from trainer.engine.sglang.wire import Broken, Gone, Refused, Wire

WRITE_S = 3600.0
"""For one turn, the time included in which the engine is paused; a rollout's own limits are shorter."""
ABORT_S = 5.0
BACK_S = 300.0
"""For a server that is somebody else's to start again."""
HUNG_S = 20.0
"""For one of ours that lives and does not answer."""
SHORT = 2
"""Times that one may run out of memory with the same weights, before it is not started again."""
READ_S = 60.0
"""For a sibling to read what a group begins with; who waits for longer reads it as well."""
OPENING = Sampling(max_tokens=0)


@dataclass(eq=False)
class _Live:
    """A request that is being answered."""

    rid: str
    key: str
    version: int
    """Of the weights that it is begun with."""
    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    aborted: bool = False
    over: anyio.Event = field(default_factory=anyio.Event)


@dataclass(eq=False)
class Replica:
    wire: Wire
    facts: Facts
    cache: str
    """With a version, names what may be read again: another run's weights may have the same number."""
    server: Server | None = None
    """Where it is ours to start again."""
    writers: tuple[Wire, ...] = ()
    """Behind a router, all of the servers that it may have write."""
    up: bool = True
    error: EngineError | None = None
    """Why it is not up."""
    lent: list[str] = field(default_factory=list)
    """What of its memory the trainer has."""
    mended: anyio.Event = field(default_factory=anyio.Event)
    """Set when nobody works any more on having it back, whether or not it is."""
    shortages: int = 0
    """How often it ran out of memory with these weights."""
    _openings: dict[tuple[str, int], anyio.Event] = field(default_factory=dict)
    """By group and version, what its rollouts begin with: set when it was read."""
    _live: dict[str, _Live] = field(default_factory=dict)
    """By request, as it was first asked for."""

    @property
    def url(self) -> str:
        return self.wire.url

    @property
    def load(self) -> int:
        return len(self._live)

    @property
    def target(self) -> Target:
        return Target(self.wire, self.facts)

    async def write(
        self, ids: Sequence[int], sampling: Sampling, key: str, version: int, images: Sequence[Image]
    ) -> Written:
        """Whoever stops waiting has it stop writing, too."""
        rid = _named(key)
        live = self._live[rid] = _Live(rid, key, version)
        body = asked(ids, sampling, rid, f"{self.cache} {version}", images)
        try:
            with live.scope:
                answer = await self._answer(live, body)
                return self._result(answer, live, written(answer, len(ids), sampling.max_tokens, bool(images)))
        except (Refused, Gone):
            if not live.aborted:
                raise
        finally:
            del self._live[rid]
            live.over.set()
        return Written((), (), "abort", max(version, 0))  # It had not begun, or did not say how far it had come.

    async def read(
        self, ids: Sequence[int], key: str, group: str, version: int, images: Sequence[Image]
    ) -> Written | None:
        """The first of a group reads what all of them begin with, and the others wait: a server that is asked by all of
        them at once reads it as often. Nothing for those that waited."""
        opening = self._openings.get((group, version))
        if opening is not None:
            with anyio.move_on_after(READ_S):
                await opening.wait()
            return None
        opening = self._openings[group, version] = anyio.Event()
        try:
            return await self.write(ids, OPENING, key, version, images)
        finally:
            opening.set()

    def forget(self) -> None:
        """With new weights, what was read is of no use."""
        self._openings.clear()
        self.shortages = 0

    async def _answer(self, live: _Live, body: Mapping[str, Any]) -> Any:
        """Asked for once more where the line breaks, under another name: it may have been heard, and SGLang refuses a
        name that it still writes under."""
        try:
            return await self._asked(live.rid, body)
        except Broken:
            await self._hung_up(live.rid)
            if live.aborted:
                raise
        live.rid = _named(live.key)
        return await self._asked(live.rid, {**body, "rid": live.rid})

    async def _asked(self, rid: str, body: Mapping[str, Any]) -> Any:
        over = False
        try:
            answer = await self.wire.post("/generate", body, within=WRITE_S)
            over = True
            return answer
        except EngineError:
            over = True
            raise
        finally:
            if not over:
                await self._hung_up(rid)

    def _result(self, answer: Any, live: _Live, result: Written) -> Written:
        if result.version < live.version:
            raise Gone(f"SGLang at {self.url} was started anew: it has weights {result.version}, not {live.version}")
        if result.stop == "abort" and not live.aborted:
            raise Gone(f"SGLang at {self.url} stopped writing: {answer['meta_info']['finish_reason'].get('message')}")
        before = tuple((max(version, 0), count) for version, count in result.before)
        return replace(result, version=max(result.version, 0), before=before)

    async def abort(self, key: str) -> None:
        """Of one rollout, or of all: they are answered with what they have, or without it where that takes long."""
        told = [live for live in self._live.values() if not key or live.key == key]
        for live in told:
            live.aborted = True
        await together(partial(self._hung_up, live.rid) for live in told)
        with anyio.move_on_after(ABORT_S):
            for live in told:
                await live.over.wait()
        for live in told:
            live.scope.cancel()

    async def back(self) -> None:
        """Waits until it answers again; one of ours that has ended, or that only stands there, is started."""
        until = anyio.current_time() + (BACK_S if self.server is None else HUNG_S)
        while True:
            if self.server is not None and not self.server.alive:
                self.shortages += self.server.short
                if self.shortages >= SHORT:
                    raise self.server.fault("ran out of memory again")
                await self._restarted(self.server)
            try:
                await self._there()
                return
            except Gone:
                if anyio.current_time() > until:
                    if self.server is None:
                        raise
                    await self._restarted(self.server)
            await anyio.sleep(1)

    async def _restarted(self, server: Server) -> None:
        """With memory of its own."""
        await server.restart()
        self.lent = []

    async def _there(self) -> None:
        if self.writers:
            await self.wire.get("/health")
        else:
            await self.wire.post("/continue_generation", {})  # Whoever paused it may be dead.

    def why(self, error: Exception) -> EngineError:
        """It could not be had back. Of one of ours that ends again and again, its own words say more."""
        told = f"could not be had back: {type(error).__name__}: {error}"
        if self.server is not None and isinstance(error, Gone):
            return self.server.fault(told)
        return error if isinstance(error, EngineError) else EngineError(f"SGLang at {self.url} {told}")

    async def version(self) -> int:
        return numbered((await self.wire.get("/model_info"))["weight_version"])

    async def _hung_up(self, rid: str) -> None:
        with anyio.move_on_after(ABORT_S, shield=True):
            try:
                await self._end(rid)
            except EngineError:
                return  # Who does not answer does not write either.

    async def _end(self, rid: str) -> None:
        """Whoever does not write it is told as well, where nobody knows who does."""
        writers = self.writers or (self.wire,)
        await together(partial(wire.post, "/abort_request", {"rid": rid}) for wire in writers)


def _named(key: str) -> str:
    """A server aborts all requests whose names begin with the one it is told: none may begin with another's."""
    return f"{key}#{uuid4().hex}"


async def somebody(replicas: Sequence[Replica]) -> bool:
    """Waits until one of them is up, whichever is first, or nobody works any more on having one back."""
    while not any(replica.up for replica in replicas):
        mending = [replica.mended for replica in replicas if not replica.mended.is_set()]
        if not mending:
            return False
        await first(event.wait for event in mending)
    return True
