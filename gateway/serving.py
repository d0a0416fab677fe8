"""Runs `mtrl-gateway serve`: a gateway from files or a tape, over HTTP and MCP, reloaded when its files change.

Files are checked once a second, and at once on SIGHUP. A new configuration replaces the old one as a whole; an invalid
one is logged and ignored.
"""

from __future__ import annotations

import logging
import math
import signal
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager, nullcontext
from pathlib import Path
from typing import Any, cast

import anyio
import anyio.to_thread
from starlette.types import ASGIApp

from gateway.build import Plan, build_plan
from gateway.errors import ConfigError, GatewayError
from gateway.gateway import Gateway, ReloadRefusal
from gateway.http.app import build_app
from gateway.http.endpoint import DisconnectWatcher
from gateway.http.settings import Settings, check_origins, read_token
from gateway.http.uvicorn_server import run
from gateway.mcp_server.transports import build_mcp_app
from gateway.process_exit import hide_environment
from gateway.server_start import ServerStart
from gateway.tape import ReplayGateway, record_gateway

FileStates = dict[Path, tuple[int, int, int]]
"""Modification time, size and inode of each file."""

MAX_SETTLE_CHECKS = 10
"""Checks after which files that keep changing count as changed anyway."""


def watch_files(paths: Collection[Path], *, every_s: float = 1.0) -> AsyncGenerator[None]:
    """Yields once per settled change of the files (or of the YAML files in folders) and once per SIGHUP.

    Changes count from this call on. `paths` is read at each check, so it may be extended meanwhile.
    Use `contextlib.aclosing`, which restores the handling of SIGHUP.
    """
    return _watch_files(paths, read_file_states(paths), every_s)


async def _watch_files(paths: Collection[Path], known: FileStates, every_s: float) -> AsyncGenerator[None]:
    can_receive = threading.current_thread() is threading.main_thread()
    with anyio.open_signal_receiver(signal.SIGHUP) if can_receive else nullcontext() as signals:
        while True:
            signalled = await _wait_for_sighup(signals, every_s)
            now = await anyio.to_thread.run_sync(read_file_states, paths, abandon_on_cancel=True)
            if now != known:
                now = await _wait_until_settled(paths, now, every_s)
            if signalled or now != known:
                known = now
                yield


async def _wait_for_sighup(signals: AsyncIterator[signal.Signals] | None, every_s: float) -> bool:
    """Waits until the next check is due; true if a SIGHUP came first."""
    with anyio.move_on_after(every_s):
        if signals is None:
            await anyio.sleep_forever()
        else:
            await anext(signals)
            return True
    return False


async def _wait_until_settled(paths: Collection[Path], now: FileStates, every_s: float) -> FileStates:
    """The file states once two checks agree, because editors write in several steps."""
    for _ in range(MAX_SETTLE_CHECKS):
        await anyio.sleep(every_s / 4)
        before, now = now, await anyio.to_thread.run_sync(read_file_states, paths, abandon_on_cancel=True)
        if before == now:
            break
    return now


def read_file_states(paths: Collection[Path]) -> FileStates:
    """The current state of the files; missing files are left out."""
    states: FileStates = {}
    for path in tuple(paths):
        for file in (*path.glob("*.yaml"), *path.glob("*.yml")) if path.is_dir() else (path,):
            try:
                state = file.stat()
            except OSError:
                continue
            states[file] = (state.st_mtime_ns, state.st_size, state.st_ino)
    return states


log = logging.getLogger(__name__)


@asynccontextmanager
async def reload_on_change(
    gateway: Gateway, plan: Plan, tools: Path | None, servers: Path | None
) -> AsyncIterator[None]:
    """Reloads the gateway during the block whenever the files of its plan change."""
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_reload_on_change, gateway, plan, tools, servers)
        yield
        tasks.cancel_scope.cancel()


async def _reload_on_change(gateway: Gateway, plan: Plan, tools: Path | None, servers: Path | None) -> None:
    watched = {*plan.config.files, *(path for path in (tools, servers) if path)}
    logged = log_notes(plan, set())
    async with aclosing(watch_files(watched)) as changed:
        async for _ in changed:
            try:
                new = build_plan(tools, servers, plan.services)
                await gateway.reload(new.sources)
            except GatewayError as error:
                gateway.reload_refusal = ReloadRefusal(str(error), time.time())
                log.error("the new configuration is invalid, so the old one stays in use:\n%s", error)
            else:
                gateway.reload_refusal = None
                watched.update(new.config.files)
                logged = log_notes(new, logged)
                log.warning("reloaded the configuration: %d tools are offered", len(gateway.specs))


def log_notes(plan: Plan, logged: set[str]) -> set[str]:
    """Logs what was ignored or interpreted in files of other clients, each note once."""
    for note in plan.config.notes:
        if note not in logged:
            log.warning("%s", note)
    return {*logged, *plan.config.notes}


def settings_of(
    host: str,
    port: int,
    token_file: Path | None,
    allow_origins: Sequence[str] = (),
    callers: Path | None = None,
) -> Settings:
    """HTTP settings from command-line options."""
    token = read_token(token_file) if token_file else None
    if callers is not None and token_file is not None:
        raise ConfigError("`--callers` excludes `--token-file`", field="callers", remedy="give one of them")
    check_origins(allow_origins)
    origins = tuple(allow_origins)
    return Settings(host=host, port=port, token=token, callers=callers, allow_origins=origins)


def serve_tape(tape: Path, settings: Settings) -> None:
    """Serves the answers of a tape, without tools or servers."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # there is no configuration to reload
    _serve(ReplayGateway(tape), settings)


def serve_files(
    tools: Path | None, servers: Path | None, settings: Settings, record: Path | None = None, wait_s: float = math.inf
) -> None:
    """Serves the gateway that the files describe, and reloads it when they change.

    Listings wait `wait_s` for servers that are starting. A tape begins with the list of tools, so a recorded gateway
    listens only when all have started.
    """
    plan = build_plan(tools, servers)
    start = ServerStart(listen_first=record is None, wait_s=wait_s if record is None else math.inf)
    gateway = Gateway(plan.sources, services=plan.services, start=start)
    reloading = reload_on_change(gateway, plan, tools, servers)
    _serve(record_gateway(gateway, record) if record else gateway, settings, reloading)


def _serve(gateway: Gateway, settings: Settings, *background: AbstractAsyncContextManager[Any]) -> None:
    hide_environment()
    build, lifespans = build_apps(gateway, settings)
    run(gateway, settings, build=build, background=(*lifespans, *background))


def build_apps(
    gateway: Gateway, settings: Settings
) -> tuple[Callable[[DisconnectWatcher], ASGIApp], Sequence[AbstractAsyncContextManager[None]]]:
    """What builds the application, once the gateway runs, and the lifespans of its MCP servers; by caller, if named."""
    if settings.callers is None:
        app, lifespan = build_mcp_app(gateway, body_bytes=settings.body_bytes)
        return lambda disconnects: build_app(gateway, settings, disconnects, {"/mcp": app}), (lifespan,)
    from gateway.http.callers import CallerGateway, CallersApp, read_callers

    callers = read_callers(settings.callers)
    views = [cast(Gateway, CallerGateway(gateway, name, caller)) for name, caller in callers.items()]
    fronts = [build_mcp_app(view, body_bytes=settings.body_bytes) for view in views]
    own = [settings.model_copy(update={"token": caller.token}) for caller in callers.values()]

    def build(disconnects: DisconnectWatcher) -> ASGIApp:
        apps = [
            build_app(view, settings, disconnects, {"/mcp": app})
            for view, settings, (app, _) in zip(views, own, fronts, strict=True)
        ]
        return CallersApp(list(zip(callers.values(), apps, strict=True)), refuse=apps[0])

    return build, [lifespan for _, lifespan in fronts]
