"""Fake SGLang servers on real ports, and an engine connected to them."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from contextlib import AbstractContextManager, AsyncExitStack, asynccontextmanager, nullcontext

import anyio
import uvicorn
from anyio.abc import TaskGroup
from starlette.applications import Starlette

from tests.trainer.engine_sglang.fake_sglang import IDS, Fake
from tests.waiting import wait_until
from trainer.engine.base import Generation, Sampling
from trainer.engine.sglang.sglang_engine import SGLangEngine
from trainer.engine.sglang.weight_sync.tensors import TensorSync
from trainer.engine.sglang.weight_sync.verify import LogprobFn, TrainerReference


class _Quiet(uvicorn.Server):
    def capture_signals(self) -> AbstractContextManager[None]:  # type: ignore[override]
        """They are the test's."""
        return nullcontext()


@asynccontextmanager
async def hosting(app: Starlette) -> AsyncIterator[str]:
    """The address of an application that is served on a real port."""
    with socket.socket() as port:
        port.bind(("127.0.0.1", 0))
        server = _Quiet(uvicorn.Config(app, log_level="error", lifespan="off", timeout_graceful_shutdown=1))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(server.serve, [port])
            await wait_until(lambda: server.started)
            try:
                yield "http://{}:{}".format(*port.getsockname())
            finally:
                server.should_exit = True


@asynccontextmanager
async def serving(*fakes: Fake) -> AsyncIterator[list[str]]:
    """Their addresses. What is still being answered at the end is let go."""
    async with AsyncExitStack() as stack:
        for fake in fakes:
            fake.going.set()
            fake.url = await stack.enter_async_context(hosting(fake.app()))
        try:
            yield [fake.url for fake in fakes]
        finally:
            for fake in fakes:
                fake.released.set()
                fake.going.set()


@asynccontextmanager
async def opened(*fakes: Fake, finds: LogprobFn | None = None, **more: bool) -> AsyncIterator[SGLangEngine]:
    async with (
        serving(*fakes) as urls,
        SGLangEngine(urls, TensorSync(), reference=TrainerReference(finds), **more) as engine,
    ):
        with anyio.fail_after(60):
            yield engine


def start_turn(tasks: TaskGroup, engine: SGLangEngine, sampling: Sampling, key: str = "a") -> list[Generation]:
    """Starts a turn; it is in the list once it has ended."""
    ended: list[Generation] = []

    async def run() -> None:
        ended.append(await engine.generate(IDS, sampling, key=key))

    tasks.start_soon(run)
    return ended
