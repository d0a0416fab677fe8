"""Serves a gateway with uvicorn: binds the port, announces the URL, and shuts down gracefully on a signal."""

from __future__ import annotations

import asyncio
import errno
import gc
import logging
import math
import os
import resource
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, contextmanager, suppress
from typing import Any

import anyio
import uvicorn
from anyio.abc import TaskStatus
from starlette.types import ASGIApp

from gateway.errors import ConfigError
from gateway.gateway import Gateway
from gateway.http.app import build_app
from gateway.http.bounded_protocol import bound_protocol
from gateway.http.endpoint import DisconnectWatcher
from gateway.http.settings import Settings, check_token_required
from gateway.tracing import tracing

SHUTDOWN_TIMEOUT_S = 5
"""Time for responses under way when the server stops."""
KEEP_ALIVE_S = 75
"""Longer than clients keep idle connections, so that none is closed while a request is sent on it."""
MAX_OPEN_FILES = 65_536
GC_OBJECTS = 20_000
"""New objects after which the young ones are collected; a session has 47."""
ACCEPT_PAUSE_S = 1.0
"""How long no connection is accepted after one that could not be, because there is no file for it."""

log = logging.getLogger(__name__)


class StopSignal:
    """Stops a server: gracefully while it serves, at once before that or on a second call."""

    def __init__(self) -> None:
        self.scope = anyio.CancelScope()
        self.serving = False
        self.requested = anyio.Event()
        """Set when a graceful stop is requested."""

    def __call__(self) -> None:
        if self.serving and not self.requested.is_set():
            self.requested.set()
        else:
            self.scope.cancel()


class Server(uvicorn.Server):
    """A uvicorn server that leaves signals alone and calls `ready` when it accepts connections."""

    def __init__(self, config: uvicorn.Config, ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._ready = ready
        self._accepting = anyio.CancelScope()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        async with anyio.create_task_group() as self._connecting:
            await super().serve(sockets)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup([])
        for listening in sockets or ():
            listening.setblocking(False)
            listening.listen(self.config.backlog)
            self._connecting.start_soon(self._accept_until_shutdown, listening)
        self._ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.stop_accepting(sockets)
        await super().shutdown(sockets)

    def stop_accepting(self, sockets: list[socket.socket] | None) -> None:
        self._accepting.cancel()
        for listening in sockets or ():
            listening.close()

    async def _accept_until_shutdown(self, listening: socket.socket) -> None:
        with self._accepting:
            await self.accept(listening, self.config)

    async def accept(self, listening: socket.socket, config: uvicorn.Config, most: float = math.inf) -> None:
        """Accepts all connections that wait, until it is cancelled; those above `most` are closed. uvloop takes one
        between two turns of all others, so that with 512 busy callers the last one waited for three seconds."""
        opened: list[socket.socket] = []
        while True:
            await anyio.wait_readable(listening)
            try:
                for _ in range(self.config.backlog):
                    connection = listening.accept()[0]
                    if most < math.inf:
                        opened = [other for other in opened if other.fileno() >= 0] + [connection]
                    if len(opened) > most:
                        connection.close()
                    else:
                        self._connecting.start_soon(self._connect, connection, config)
            except BlockingIOError:
                continue
            except OSError as error:  # too many open files, or the client is gone already
                log.warning("a connection was not accepted: %s", error)
                await anyio.sleep(ACCEPT_PAUSE_S)

    async def _connect(self, connection: socket.socket, config: uvicorn.Config) -> None:
        def make_protocol() -> Any:
            return config.http_protocol_class(  # type: ignore[call-arg]
                config=config, server_state=self.server_state, app_state=self.lifespan.state
            )

        with suppress(OSError):  # the client is gone already
            await asyncio.get_running_loop().connect_accepted_socket(make_protocol, connection)


class _GatewayServer(Server):
    """A server that closes the gateway's sessions before their connections."""

    def __init__(
        self,
        config: uvicorn.Config,
        gateway: Gateway,
        disconnects: DisconnectWatcher,
        stop: StopSignal,
        ready: Callable[[], None],
    ) -> None:
        super().__init__(config, ready)
        self._gateway, self._disconnects, self._stop = gateway, disconnects, stop

    async def exit_when_stopped(self) -> None:
        await self._stop.requested.wait()
        self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._stop.serving = True  # before the URL is announced
        await super().startup(sockets)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.stop_accepting(sockets)
        self._disconnects.stopping.set()
        async with anyio.create_task_group() as closing:
            for session in list(self._gateway.sessions.values()):
                closing.start_soon(session.close)
        await super().shutdown(sockets)


async def serve(
    gateway: Gateway,
    settings: Settings,
    *,
    stop: StopSignal,
    ready: Callable[[str], None],
    build: Callable[[DisconnectWatcher], ASGIApp] | None = None,
    background: Sequence[AbstractAsyncContextManager[Any]] = (),
) -> None:
    """Binds the port, enters the gateway and the background contexts, and serves until `stop` is called.

    `ready` is called with the URL once the server accepts connections. `build` makes the application, if it is to
    have more than the HTTP API.
    """
    check_token_required(settings)
    with stop.scope, bind_socket(settings) as listening:
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(gateway)
            for context in background:
                await stack.enter_async_context(context)
            url = server_url(settings, listening)
            disconnects = DisconnectWatcher()
            served = build(disconnects) if build else build_app(gateway, settings, disconnects)
            traces = await stack.enter_async_context(tracing(os.environ))
            if traces is not None:
                gateway.observers.append(traces.observe)
                served = traces.wrap_app(served)
            server = _GatewayServer(
                make_uvicorn_config(served, settings), gateway, disconnects, stop, lambda: ready(url)
            )
            tasks = await stack.enter_async_context(anyio.create_task_group())
            tasks.start_soon(disconnects.run)
            tasks.start_soon(server.exit_when_stopped)
            await server.serve([listening])
            tasks.cancel_scope.cancel()


def bind_socket(settings: Settings) -> socket.socket:
    """Binds the port first of all, because a port in use is the most likely failure."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    # Without uvloop, asyncio disables Nagle's algorithm (a delay of 40 ms) only on sockets with protocol TCP.
    listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((settings.host, settings.port))
    except OSError as error:
        listening.close()
        if error.errno == errno.EADDRINUSE:
            remedy = "stop the program that uses it, or choose another port (`--port`; 0 takes a free one)"
            raise ConfigError(f"{settings.host}:{settings.port} is in use", field="port", remedy=remedy) from error
        problem = f"cannot listen on {settings.host}:{settings.port}: {error.strerror}"
        raise ConfigError(problem, field="host", remedy="give an address of this machine") from error
    return listening


def run(
    gateway: Gateway,
    settings: Settings,
    *,
    build: Callable[[DisconnectWatcher], ASGIApp] | None = None,
    background: Sequence[AbstractAsyncContextManager[Any]] = (),
) -> None:
    """Serves until SIGTERM or SIGINT; a second signal stops at once."""

    async def main() -> None:
        stop = StopSignal()
        async with anyio.create_task_group() as tasks:
            await tasks.start(stop_on_signals, stop)
            await serve(gateway, settings, stop=stop, ready=_start_serving, build=build, background=background)
            tasks.cancel_scope.cancel()

    _raise_open_file_limit()
    anyio.run(main, backend_options={"use_uvloop": True})


def _raise_open_file_limit() -> None:
    """Every client is an open file, and the usual limit of 1024 is less than one batch of rollouts."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    target = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < target:
        with suppress(OSError, ValueError):  # the system's real limit may be lower than the reported one
            resource.setrlimit(resource.RLIMIT_NOFILE, (target, hard))


async def stop_on_signals(stop: StopSignal, *, task_status: TaskStatus[None]) -> None:
    """Calls `stop` for each SIGTERM and SIGINT."""
    with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        task_status.started()
        async for _ in signals:
            stop()


def make_uvicorn_config(
    app: ASGIApp, settings: Settings, *, keep_alive_s: int = KEEP_ALIVE_S, shutdown_s: int = SHUTDOWN_TIMEOUT_S
) -> uvicorn.Config:
    """How every server of ours runs: bounded requests, nothing logged, no header that says what it is."""
    return uvicorn.Config(
        app,
        http=bound_protocol(settings),
        interface="asgi3",
        lifespan="off",
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        backlog=2048,
        timeout_keep_alive=keep_alive_s,
        timeout_graceful_shutdown=shutdown_s,
    )


def server_url(settings: Settings, listening: socket.socket) -> str:
    """The address of a server that listens on a socket."""
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    return f"http://{host}:{listening.getsockname()[1]}"


def collect_garbage_seldom() -> None:
    """Collecting stops every thread: it passes over what is there now, and happens after many objects more."""
    gc.collect()
    gc.freeze()
    # By default, 700 more objects make a collection, and every tenth passes over sessions too. The second generation
    # stays small, since every call waits for it: 60,000 objects take .03 s on a slow core.
    gc.set_threshold(GC_OBJECTS, 2, 100)


def _start_serving(url: str) -> None:
    collect_garbage_seldom()
    sys.stdout.write(f"mtrl-gateway: {url} (tools: /v1/tools, MCP: /mcp, API: /openapi.json); web UI: {url}/ui\n")
    sys.stdout.flush()
