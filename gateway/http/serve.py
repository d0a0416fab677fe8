"""The gateway under uvicorn: one task enters and leaves it, one line says where it is, one signal ends it in order."""

from __future__ import annotations

import errno
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, contextmanager, suppress
from typing import Any

import anyio
import uvicorn
from anyio.abc import TaskStatus
from starlette.types import ASGIApp

from gateway.errors import ConfigError
from gateway.http.app import app
from gateway.http.hosted import Hosted
from gateway.http.settings import Settings, refuse_open_door
from gateway.http.watch import Watch
from gateway.trace import tracing

if sys.platform != "win32":
    import resource

DRAIN_S = 5
"""For answers that are under way when the server stops."""
KEEP_ALIVE_S = 75
"""Longer than clients keep an idle connection, so that none is closed under a request."""
MOST_FILES = 65_536


class Stop:
    """Asks a server to end: in order while it serves; at once before that, or when asked again."""

    def __init__(self) -> None:
        self.scope = anyio.CancelScope()
        self.serving = False
        self._asked = anyio.Event()

    def __call__(self) -> None:
        if self.serving and not self._asked.is_set():
            self._asked.set()
        else:
            self.scope.cancel()

    async def asked(self) -> None:
        await self._asked.wait()


class Server(uvicorn.Server):
    """Leaves the signals to us, and says when it is ready."""

    def __init__(self, config: uvicorn.Config, ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._ready = ready

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._ready()


class _Hosting(Server):
    """Lets sessions go before their connections."""

    def __init__(
        self, config: uvicorn.Config, gateway: Hosted, watch: Watch, stop: Stop, ready: Callable[[], None]
    ) -> None:
        super().__init__(config, ready)
        self._gateway, self._watch, self._stop = gateway, watch, stop

    async def heed(self) -> None:
        await self._stop.asked()
        self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._stop.serving = True  # before anybody is told where to call
        await super().startup(sockets)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for listening in self.servers:
            listening.close()
        self._watch.over.set()
        async with anyio.create_task_group() as closing:
            for session in list(self._gateway.sessions.values()):
                closing.start_soon(session.close)
        await super().shutdown(sockets)


async def serve(
    gateway: Hosted,
    settings: Settings,
    *,
    stop: Stop,
    ready: Callable[[str], None],
    mounts: Mapping[str, ASGIApp] | None = None,
    beside: Sequence[AbstractAsyncContextManager[Any]] = (),
) -> None:
    """Takes the port, enters the gateway and what runs beside it, and serves until it is asked to stop.

    `ready` is given the URL once callers may come.
    """
    refuse_open_door(settings)
    with stop.scope, bind(settings) as listening:
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(gateway)
            for one in beside:
                await stack.enter_async_context(one)
            url = _url(settings, listening)
            watch = Watch()
            served = app(gateway, settings, watch, mounts)
            traces = await stack.enter_async_context(tracing(os.environ))
            if traces is not None:
                gateway.observers.append(traces.observe)
                served = traces.around(served)
            server = _Hosting(_config(served), gateway, watch, stop, lambda: ready(url))
            tasks = await stack.enter_async_context(anyio.create_task_group())
            tasks.start_soon(watch.run)
            tasks.start_soon(server.heed)
            await server.serve([listening])
            tasks.cancel_scope.cancel()


def bind(settings: Settings) -> socket.socket:
    """Takes the port before anything is started, since a port in use is the likeliest thing to go wrong."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    # Without uvloop, asyncio spares answers a delay of 40 ms only on sockets that say they are TCP.
    listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((settings.host, settings.port))
    except OSError as error:
        listening.close()
        if error.errno == errno.EADDRINUSE:
            remedy = "stop what listens there, or choose another port (`--port`; 0 takes a free one)"
            raise ConfigError(f"{settings.host}:{settings.port} is in use", field="port", remedy=remedy) from error
        problem = f"cannot listen on {settings.host}:{settings.port}: {error.strerror}"
        raise ConfigError(problem, field="host", remedy="name an address of this machine") from error
    return listening


def run(
    gateway: Hosted,
    settings: Settings,
    *,
    mounts: Mapping[str, ASGIApp] | None = None,
    beside: Sequence[AbstractAsyncContextManager[Any]] = (),
) -> None:
    """Serves until SIGTERM or SIGINT; a second one hurries."""

    async def main() -> None:
        stop = Stop()
        async with anyio.create_task_group() as tasks:
            await tasks.start(_listen, stop)
            await serve(gateway, settings, stop=stop, ready=_say, mounts=mounts, beside=beside)
            tasks.cancel_scope.cancel()

    _make_room()
    anyio.run(main, backend_options={"use_uvloop": sys.platform != "win32"})


def _make_room() -> None:
    """Every caller is an open file, and the usual allowance of 1024 is less than one batch of rollouts."""
    if sys.platform == "win32":
        return
    now, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_FILES if most == resource.RLIM_INFINITY else min(most, MOST_FILES)
    if now != resource.RLIM_INFINITY and now < wanted:
        with suppress(OSError, ValueError):  # a system may know a lower limit than it tells
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))


async def _listen(stop: Stop, *, task_status: TaskStatus[None]) -> None:
    with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        task_status.started()
        async for _ in signals:
            stop()


def _config(served: ASGIApp) -> uvicorn.Config:
    return uvicorn.Config(
        served,
        lifespan="off",
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        backlog=2048,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=DRAIN_S,
    )


def _url(settings: Settings, listening: socket.socket) -> str:
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    return f"http://{host}:{listening.getsockname()[1]}"


def _say(url: str) -> None:
    sys.stdout.write(f"mtrl-gateway: {url} (tools: /v1/tools, MCP: /mcp, docs: /docs); its page: {url}/ui\n")
    sys.stdout.flush()
