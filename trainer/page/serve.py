"""The page under uvicorn: beside it, one task lists what is written; one signal, or its scope, ends both."""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial

import anyio
import uvicorn
from anyio import to_thread
from anyio.abc import TaskStatus
from anyio.from_thread import start_blocking_portal

from gateway.http.serve import Server, bind
from gateway.http.settings import Settings, refuse_open_door
from trainer.page.app import app
from trainer.page.runs import Run

log = logging.getLogger(__name__)

LOOK_S = 0.5
"""Between two looks whether more was written."""
BREATH_S = 0.005
"""Between two of many that are listed, so that whoever asks meanwhile is answered first."""
LEAVE_S = 2
"""For answers that are under way when it ends."""

ENDED_S = 30.0
"""For a search or a listing that is under way as well."""


async def serve(
    runs: Sequence[Run], settings: Settings, ready: Callable[[str], None], *, stop: anyio.Event | None = None
) -> None:
    """Until `stop` is set, or it is cancelled. `ready` is given the URL once callers may come."""
    refuse_open_door(settings)
    with bind(settings) as listening, ExitStack() as stack:
        for run in runs:
            stack.callback(run.stop)
        host = f"[{settings.host}]" if ":" in settings.host else settings.host
        url = f"http://{host}:{listening.getsockname()[1]}/ui/"
        server = Server(_config(runs, settings), lambda: ready(url))
        async with anyio.create_task_group() as tasks:
            for run in runs:
                tasks.start_soon(_follow, run)
            if stop is not None:
                tasks.start_soon(_heed, server, stop)
            await server.serve([listening])
            tasks.cancel_scope.cancel()


@contextmanager
def beside(runs: Sequence[Run], settings: Settings) -> Iterator[str]:
    """In a thread of its own, beside whatever else goes on; gives the URL."""
    with start_blocking_portal() as portal:
        stop = portal.call(anyio.Event)
        served, url = portal.start_task(partial(_begin, runs, settings, stop))
        try:
            yield str(url)
        finally:
            portal.call(stop.set)
            served.result(ENDED_S)


async def _begin(runs: Sequence[Run], settings: Settings, stop: anyio.Event, *, task_status: TaskStatus[str]) -> None:
    await serve(runs, settings, task_status.started, stop=stop)


async def serve_until_signal(runs: Sequence[Run], settings: Settings, ready: Callable[[str], None]) -> None:
    stop = anyio.Event()
    async with anyio.create_task_group() as tasks:
        with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
            tasks.start_soon(serve_and_leave, runs, settings, ready, stop, tasks.cancel_scope)
            async for _ in signals:
                if stop.is_set():
                    break
                stop.set()
            tasks.cancel_scope.cancel()


async def serve_and_leave(
    runs: Sequence[Run],
    settings: Settings,
    ready: Callable[[str], None],
    stop: anyio.Event,
    scope: anyio.CancelScope,
) -> None:
    await serve(runs, settings, ready, stop=stop)
    scope.cancel()


async def _heed(server: Server, stop: anyio.Event) -> None:
    await stop.wait()
    server.should_exit = True


async def _follow(run: Run) -> None:
    """Whatever is written is listed, a little at a time, so that whoever asks meanwhile is answered."""
    told = ""
    while True:
        more = False
        try:
            more = await to_thread.run_sync(run.grow)
        except Exception as error:  # boundary: what cannot be listed ends no page, and no training beside it
            if told != f"{type(error).__name__}: {error}":
                told = f"{type(error).__name__}: {error}"
                log.warning("%s: its rollouts cannot be listed for now (%s)", run.folder, told)
        await anyio.sleep(BREATH_S if more else LOOK_S)


def _config(runs: Sequence[Run], settings: Settings) -> uvicorn.Config:
    return uvicorn.Config(
        app(runs, settings),
        lifespan="off",
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=LEAVE_S,
    )
