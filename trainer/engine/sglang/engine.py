"""Rollouts are written by SGLang servers, one or many, with the weights that the trainer published, or not at all."""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self
from uuid import uuid4

import anyio
from anyio import to_thread
from anyio.abc import TaskGroup

from gateway.types import Image
from trainer.engine.base import Agreement, Capabilities, EngineError, Sampling, Written
from trainer.engine.sglang.check import check, labelled
from trainer.engine.sglang.kept import Kept
from trainer.engine.sglang.lend import CACHE, WEIGHTS, lend, regain
from trainer.engine.sglang.own import NOTHING, Own
from trainer.engine.sglang.prints import Prints
from trainer.engine.sglang.probe import probed
from trainer.engine.sglang.publish.way import Way, distinct
from trainer.engine.sglang.pulse import pulse
from trainer.engine.sglang.replica import ABORT_S, Replica, somebody
from trainer.engine.sglang.router import behind
from trainer.engine.sglang.routes import Routes
from trainer.engine.sglang.server import Server
from trainer.engine.sglang.together import together
from trainer.engine.sglang.turn import Turn
from trainer.engine.sglang.wire import ASK_S, Gone, Silent, Wire

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger(__name__)
TRIES = 4
"""To have a turn written, or weights published, where servers are lost on the way."""
SETTLE_S = 10.0
"""For one behind a router to be given its weights, before more is written through it."""


class SGLangEngine:
    """`servers` are addresses of servers that run, or of a router, or servers to be started; `own` is the trainer's
    side.

    With `in_place`, what is being written while weights are published goes on with what it has read under the earlier
    ones; otherwise it reads it again. With `lends`, they have been started so that they can give memory away. With
    `flows`, weights will be published while turns are written, which servers must be able to tell of.
    """

    def __init__(
        self,
        servers: Sequence[str | Server],
        way: Way,
        *,
        own: Own = NOTHING,
        in_place: bool = False,
        lends: bool = False,
        flows: bool = False,
    ) -> None:
        self._lends, self._flows, self._mode = lends, flows, "in_place" if in_place else "retract"
        self._servers, self._way, self._kept = servers, way, Kept(own)
        self._stack, self._filed = AsyncExitStack(), own.filed
        self._prints = Prints(own.eyes.shown) if own.eyes else Prints()
        self.replicas: list[Replica] = []
        self.router: Replica | None = None
        """Where it is what all is written through."""
        self.routes = Routes()
        self._alone = anyio.Lock()
        self._paused = False
        self._losses = 0
        self._unseen = False
        """There are weights that were published while nobody could be asked about them."""
        self._turns: set[Turn] = set()
        self._tasks: TaskGroup | None = None

    @property
    def capabilities(self) -> Capabilities:
        if not self.replicas:
            raise EngineError("the engine is not open; enter it with `async with` first")
        facts = [replica.facts for replica in self.replicas]
        many = f" x {len(facts)}" if len(facts) > 1 else ""
        return Capabilities(
            facts[0].name + many + (" behind a router" if self.router else ""),
            exact=self.agreement is not None and self.agreement.exact,
            images=all(one.images for one in facts),
            context=min(one.context for one in facts),
            notes=tuple(sorted({note for one in facts for note in one.notes})),
        )

    @property
    def version(self) -> int:
        """-1 until weights are published: what a server was started with, it alone knows."""
        return self._kept.version

    @property
    def agreement(self) -> Agreement | None:
        """Between the servers and the trainer, when weights were last published; the worst of all."""
        return self._kept.agreement

    @property
    def counted(self) -> Mapping[str, float]:
        """Requests by why they went where they did, and by server; and servers that were lost."""
        return self.routes.told | {"servers_lost": self._losses}

    async def __aenter__(self) -> Self:
        cache = uuid4().hex
        async with AsyncExitStack() as stack:
            for server in self._servers:
                ours = None if isinstance(server, str) else await stack.enter_async_context(server)
                wire = await stack.enter_async_context(Wire(ours.url if ours else str(server)))
                urls = () if ours else await behind(wire)
                if urls and len(self._servers) > 1:
                    raise EngineError(f"{wire.url} is a router: name it alone, or the servers {', '.join(urls)}")
                wires = [await stack.enter_async_context(Wire(url)) for url in urls] or [wire]
                self.replicas += [Replica(one, await probed(one, ours), cache, ours) for one in wires]
                if urls:
                    self.router = Replica(wire, self.replicas[0].facts, cache, writers=tuple(wires))
            if self._flows:
                labelled(self.replicas)
            stack.push_async_callback(self._closed)
            self._tasks = await stack.enter_async_context(anyio.create_task_group())
            stack.callback(self._tasks.cancel_scope.cancel)
            for replica in self.replicas:
                self._tasks.start_soon(pulse, replica, partial(self._awaited, replica), self._lost)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()
        self.replicas, self.router = [], None

    async def _closed(self) -> None:
        with anyio.move_on_after(ASK_S, shield=True):
            await self._way.close()

    async def generate(
        self, ids: Sequence[int], sampling: Sampling, *, key: str = "", group: str = "", images: Sequence[Image] = ()
    ) -> Written:
        """What a server that fails had written is written anew, by another or by itself: nobody was told of it yet."""
        check(ids, sampling, images, self.capabilities, [replica.facts for replica in self.replicas])
        if sampling.max_tokens <= 0:
            return Written((), (), "length", max(self.version, 0))
        turn = Turn(key, self._kept)
        self._turns.add(turn)
        try:
            return await self._written(turn, ids, sampling, group, await self._prints.of(images))
        finally:
            self._turns.discard(turn)
            turn.over.set()

    async def _written(
        self, turn: Turn, ids: Sequence[int], sampling: Sampling, group: str, images: Sequence[Image]
    ) -> Written:
        opens = group if turn.key and not self.routes.knows(turn.key) else ""
        for tried in range(1, TRIES + 1):
            with turn.patient():
                await self._somebody()
            if turn.aborted:
                return turn.unwritten
            replica = self._chosen(turn.key, group)
            try:
                return await turn.written(replica, ids, sampling, images, opens)
            except Gone as error:
                self._lost(replica, error)
                if tried == TRIES and not turn.aborted:
                    raise replica.error or error from error
        return turn.unwritten

    def _chosen(self, key: str, group: str) -> Replica:
        up = [place for place, replica in enumerate(self._writers) if replica.up]
        return self._writers[self.routes.choose(key, group, [replica.load for replica in self._writers], up)]

    @property
    def _writers(self) -> list[Replica]:
        return [self.router] if self.router else self.replicas

    def _awaited(self, replica: Replica) -> bool:
        return (self.router or replica).load > 0 and not self._alone.locked()

    def _lost(self, replica: Replica, error: EngineError) -> None:
        """The others go on; meanwhile it is seen to that it comes back."""
        if not replica.up or self._tasks is None:
            return
        if isinstance(error, Silent):
            replica.wire.drop(str(error))
        if replica.server is not None and (replica.server.short or not replica.server.alive):
            error = replica.server.fault("is lost")
        log.warning("%s", error)
        replica.up, replica.error, replica.mended = False, error, anyio.Event()
        self._losses += replica is not self.router
        self._tasks.start_soon(self._mend, replica)
        if self.router and replica is not self.router:  # Who waits at it may be waiting for this one.
            self._lost(self.router, error)
            self.router.wire.drop(str(error))

    async def _mend(self, replica: Replica) -> None:
        try:
            for tried in range(1, TRIES + 1):
                await replica.back()
                try:
                    await (self._settled() if replica is self.router else self._restored(replica))
                    break
                except Gone:  # Once more, while it was given the weights.
                    if tried == TRIES:
                        raise
            log.warning("SGLang at %s is back", replica.url)
        except (EngineError, TimeoutError, RuntimeError, OSError) as error:
            replica.error = replica.why(error)
        finally:
            replica.mended.set()

    async def _restored(self, replica: Replica) -> None:
        async with self._alone:
            if self._kept.weights:
                await regain(replica, WEIGHTS)
                await self._way.send([replica.target], self._kept.weights, self.version, False)
                await regain(replica, CACHE)
                await self._kept.held(replica)
            if self._paused:
                await self._stop(replica)
            replica.up, replica.error = True, None

    async def _settled(self) -> None:
        """It is not told which server failed: all are asked, and who has other weights is given them first."""
        await self._each(self._current)
        with anyio.move_on_after(SETTLE_S):
            for replica in self.replicas:
                if not replica.up:
                    await replica.mended.wait()
        await somebody(self.replicas)
        if not self._up or self.router is None:
            raise EngineError(str(self.replicas[0].error))
        self.router.up, self.router.error = True, None

    async def _current(self, replica: Replica) -> None:
        if self._kept.weights and (version := await replica.version()) != self.version:
            raise Gone(f"SGLang at {replica.url} was started anew: it has weights {version}, not {self.version}")

    async def _somebody(self) -> None:
        """Waits until a server answers, and has the weights that it says. Where none comes back, the error says why."""
        while True:
            await self._kept.steady()
            if any(replica.up for replica in self._writers):
                return
            if not await somebody(self._writers):
                raise EngineError(f"no server is left to write: {self._writers[0].error}")

    async def publish(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Where a server's version or its logprobs are not those of what was published, the error ends the run."""
        async with self._alone:
            filed = await to_thread.run_sync(self._filed, dict(distinct(weights)))
            with self._kept.changing():
                await self._replaced(filed, version)
        for replica in (*self.replicas, *self._writers):
            if not replica.up and replica.mended.is_set():
                replica.up = True
                self._lost(replica, replica.error or EngineError("it did not answer"))  # Tried once more.
        await self._somebody()

    async def _replaced(self, weights: Mapping[str, Tensor], version: int) -> None:
        if any(replica.load for replica in self._writers):
            labelled(self.replicas)
        await self._sent(weights, version)
        await self._kept.take(weights, version)
        self.routes.forget()
        for replica in {*self.replicas, *self._writers}:
            replica.forget()
        self._unseen = True
        if not self._paused:
            await self._see()

    @property
    def _up(self) -> list[Replica]:
        return [replica for replica in self.replicas if replica.up]

    async def _sent(self, weights: Mapping[str, Tensor], version: int) -> None:
        """While nobody writes. A server that is lost on the way is left out, and the others are given it all again."""
        for tried in range(1, TRIES + 1):
            await self._each(self._stop)  # Finds out as well who is there.
            try:
                if self._up:
                    await self._each(lambda replica: regain(replica, WEIGHTS))
                    there = [replica.target for replica in self._up]
                    # A turn taken up again keeps its name for what may be read: it is to find nothing of before.
                    await self._way.send(there, weights, version, self._mode == "retract")
                    await self._each(lambda replica: regain(replica, CACHE))
                return
            except Gone:
                if tried == TRIES:
                    raise
            finally:
                if not self._paused:
                    with anyio.move_on_after(ASK_S, shield=True):
                        await self._each(self._go_on)

    async def _see(self) -> None:
        """Asks all that are there which weights they have, and how likely they find a prompt with them."""
        await self._each(self._kept.held)
        self._unseen = False

    async def lend(self) -> bool:
        if self._lends:
            async with self._alone:
                await self._each(lend)
        return self._lends

    async def pause(self) -> None:
        async with self._alone:
            self._paused = True
            await self._each(self._stop)

    async def resume(self) -> None:
        async with self._alone:
            self._paused = False
            await self._each(self._go_on)
            if self._unseen:
                await self._see()

    async def abort(self, key: str = "") -> None:
        told = [turn for turn in self._turns if not key or turn.key == key]
        for turn in told:
            turn.abort()
        await together(partial(replica.abort, key) for replica in self._writers)
        with anyio.move_on_after(ABORT_S):
            for turn in told:
                await turn.over.wait()

    async def _stop(self, replica: Replica) -> None:
        await replica.wire.post("/pause_generation", {"mode": self._mode})

    async def _go_on(self, replica: Replica) -> None:
        await replica.wire.post("/continue_generation", {})

    async def _each(self, act: Callable[[Replica], Coroutine[Any, Any, None]]) -> None:
        async def acted(replica: Replica) -> None:
            try:
                await act(replica)
            except Gone as error:
                self._lost(replica, error)

        await together(partial(acted, replica) for replica in self._up)
