"""`mtrl-gateway sandboxes`: starts sandboxes on this machine for gateways on others.

Each sandbox has a lease, which every request renews: when its client is gone, the sandbox is stopped.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, replace
from secrets import token_urlsafe
from typing import Annotated, Any, TypeVar

import anyio
import uvicorn
from pydantic import Field, NonNegativeInt, PositiveInt
from starlette.types import ASGIApp

from gateway.config.base import FrozenModel
from gateway.errors import ConfigError
from gateway.http.endpoint import DisconnectWatcher, Endpoint, Router
from gateway.http.exchange import ClientDisconnected, Problem, Request, built_response, json_response, parse_body
from gateway.http.security import SecurityMiddleware
from gateway.http.settings import Settings, check_token_required
from gateway.http.uvicorn_server import (
    Server,
    StopSignal,
    bind_socket,
    make_uvicorn_config,
    server_url,
    stop_on_signals,
)
from gateway.large_json import is_large, run_beside
from gateway.process.reaper import Reaper
from gateway.sandbox.confined_process import SandboxEnded, SandboxKilled
from gateway.sandbox.host_rules import HostRules
from gateway.sandbox.large_messages import LARGE_BYTES, decode_base64, encode_base64
from gateway.sandbox.provider import BubblewrapProvider, FrozenFiles, Sandbox, SandboxProvider
from gateway.sandbox.sandbox_settings import SandboxSettings
from mtrl_plugins.sandboxes.heartbeats import BEATS_PER_LEASE
from mtrl_plugins.sandboxes.machines import PATH
from mtrl_plugins.sandboxes.remote_provider import FULL

MAX_TIME_S = 3600.0
BODY_BYTES = 64 * 2**20
MAX_TEXT = 200
NO_HOSTS = HostRules(())
HOSTS_REMEDY = "Start `mtrl-gateway sandboxes` with `--allow-host HOST` for each of them, or remove them."
M = TypeVar("M", bound=FrozenModel)
Seconds = Annotated[float, Field(gt=0, le=MAX_TIME_S)]


class StartRequest(FrozenModel):
    """What exists in a new sandbox, and its limits."""

    settings: SandboxSettings = SandboxSettings()
    keeps_files: bool = False
    """Whether it may be frozen: its files outlive its processes, until it is stopped."""
    files_of: str | None = None
    """The frozen sandbox whose files it begins with."""
    wait_s: Seconds = 0.1
    """How long it may wait for room."""


class RenewRequest(FrozenModel):
    """The sandboxes that their client still uses."""

    ids: list[str]


class FreezeRequest(FrozenModel):
    """Ends the processes of a sandbox."""

    timeout_s: Seconds
    answer_within_s: Seconds


class RunRequest(FrozenModel):
    """A command, or code for the interpreter that keeps its variables."""

    command: Annotated[list[str], Field(min_length=1)] | None = None
    stdin: str = ""
    code: str | None = None
    timeout_s: Seconds
    answer_within_s: Seconds
    """When the client wants an answer: a sandbox that gives none until then is stopped."""


class PutRequest(FrozenModel):
    """A file to write, or what is added to one; `data` is base64."""

    path: str
    data: str
    append: bool = False
    timeout_s: Seconds
    answer_within_s: Seconds


class GetRequest(FrozenModel):
    """A part of a file to read, of at most `max_bytes` in all."""

    path: str
    max_bytes: PositiveInt
    offset: NonNegativeInt = 0
    timeout_s: Seconds
    answer_within_s: Seconds


@dataclass(slots=True)
class Lease:
    """A sandbox, and until when it lives without a request."""

    sandbox: Sandbox
    ends: float
    files: FrozenFiles | None = None
    """What it left when it was frozen."""

    async def stop(self) -> None:
        await self.sandbox.stop()
        if self.files is not None:
            await self.files.close()


class SandboxServer:
    """The sandboxes of all clients."""

    def __init__(
        self, provider: SandboxProvider, most: int, lease_s: float, allowed_hosts: HostRules = NO_HOSTS
    ) -> None:
        self.provider, self.most, self.lease_s = provider, most, lease_s
        self.allowed_hosts = allowed_hosts
        """The hosts that clients may list: they are reached from this machine, which may have services of its own."""
        self.leases: dict[str, Lease] = {}
        self._starting, self._waiting = 0, 0
        self._turn, self._freed = anyio.Lock(), anyio.Event()
        self.disconnects = DisconnectWatcher()

    async def count(self, _: Request) -> ASGIApp:
        return json_response({"running": self._count_running() + self._waiting, "most": self.most})

    def _count_running(self) -> int:
        """Those that take a place: frozen files take none."""
        return sum(lease.files is None for lease in self.leases.values()) + self._starting

    async def start(self, request: Request) -> ASGIApp:
        body = await request.read_model(StartRequest)
        settings = body.settings
        if settings.readable or settings.writable or settings.provider is not None:
            raise Problem(422, "invalid_request", "Paths and providers are not a client's to name.")
        if refused := [host for host in settings.hosts if not self.allowed_hosts.includes(host)]:
            problem = f"This server does not allow hosts that `network` lists: {', '.join(refused)[:MAX_TEXT]}."
            raise Problem(422, "invalid_request", problem, remedy=HOSTS_REMEDY)
        id = token_urlsafe(24)
        try:
            sandbox = await self.disconnects.run_until_disconnect(request.receive, lambda: self._start(id, body))
            with anyio.move_on_after(0):  # Quick work is not watched.
                if (await request.receive())["type"] == "http.disconnect":
                    raise ClientDisconnected
        except ClientDisconnected:  # Nobody knows the id.
            await self._end(id)
            raise
        return json_response({"id": id, "lease_s": self.lease_s, "python": list(sandbox.python)}, 201)

    async def _start(self, id: str, body: StartRequest) -> Sandbox:
        await self._take_place(body.wait_s)
        try:
            files = None if body.files_of is None else self._find_files(body.files_of)
            sandbox = await self.provider.start(body.settings, keeps_files=body.keeps_files, files_of=files)
            self.leases[id] = Lease(sandbox, anyio.current_time() + self.lease_s)
        finally:
            self._starting -= 1
            self._free_place()
        return sandbox

    async def _take_place(self, wait_s: float) -> None:
        """Waits for room; who comes first is served first, from whichever gateway."""
        self._waiting += 1
        try:
            with anyio.move_on_after(wait_s):
                async with self._turn:
                    while self._count_running() >= self.most:
                        await self._freed.wait()
                    self._starting += 1
                    return
        finally:
            self._waiting -= 1
        remedy = "Try again when one has ended, or start the server with a higher --most."
        raise Problem(FULL, "unavailable", f"All {self.most} sandboxes are in use.", remedy=remedy)

    def _free_place(self) -> None:
        """The first that waits looks whether there is room."""
        self._freed.set()
        self._freed = anyio.Event()

    def _find_lease(self, id: str) -> Lease:
        lease = self.leases.get(id)
        if lease is None:
            raise Problem(404, "not_found", "There is no such sandbox: it was stopped, or its lease has ended.")
        lease.ends = anyio.current_time() + self.lease_s
        return lease

    def _find(self, request: Request) -> Sandbox:
        return self._find_lease(request.path_params["id"]).sandbox

    def _find_files(self, id: str) -> FrozenFiles:
        if (files := self._find_lease(id).files) is None:
            raise Problem(422, "invalid_request", "The sandbox of `files_of` is not frozen.")
        return files

    async def renew(self, request: Request) -> ASGIApp:
        for id in (await request.read_model(RenewRequest)).ids:
            if id in self.leases:
                self._find_lease(id)
        return json_response({})

    async def run(self, request: Request) -> ASGIApp:
        sandbox, body = self._find(request), await _read_model(request, RunRequest)
        if (body.command is None) == (body.code is None):
            raise Problem(422, "invalid_request", "A run has either `command` or `code`.")

        async def do() -> Mapping[str, Any]:
            if body.code is not None:
                done = await sandbox.run_python(body.code, body.timeout_s)
            else:
                done = await sandbox.run(body.command or [], await _decode(body.stdin), body.timeout_s)
            return asdict(replace(done, images=())) | {"images": [await encode_base64(image) for image in done.images]}

        return await self._answer(sandbox, body.answer_within_s, do)

    async def put(self, request: Request) -> ASGIApp:
        sandbox, body = self._find(request), await _read_model(request, PutRequest)

        async def do() -> Mapping[str, Any]:
            await sandbox.put(body.path, await _decode(body.data), append=body.append)
            return {}

        return await self._answer(sandbox, body.answer_within_s, do)

    async def get(self, request: Request) -> ASGIApp:
        sandbox, body = self._find(request), await request.read_model(GetRequest)

        async def do() -> Mapping[str, Any]:
            piece, is_end = await sandbox.get_piece(body.path, body.max_bytes, body.offset)
            return {"data": await encode_base64(piece), "is_end": is_end}

        return await self._answer(sandbox, body.answer_within_s, do)

    async def freeze(self, request: Request) -> ASGIApp:
        lease, body = self._find_lease(request.path_params["id"]), await request.read_model(FreezeRequest)

        async def do() -> Mapping[str, Any]:
            lease.files = lease.files or await lease.sandbox.freeze()
            self._free_place()
            return {}

        return await self._answer(lease.sandbox, body.answer_within_s, do)

    async def _answer(
        self, sandbox: Sandbox, within_s: float, do: Callable[[], Awaitable[Mapping[str, Any]]]
    ) -> ASGIApp:
        """The answer, which tells whose doing a failure is: `ended` and `error` are the policy's, `killed` is not."""
        try:
            with anyio.move_on_after(within_s):
                answer = await do()
                return await built_response(lambda: answer, is_large=is_large(answer, LARGE_BYTES))
            await sandbox.end()
            return json_response({"ended": "it did not answer in time"})
        except SandboxEnded as error:
            return json_response({"ended": str(error)})
        except (SandboxKilled, anyio.ClosedResourceError) as error:  # Its client may stop it meanwhile.
            return json_response({"killed": str(error) or "it was stopped"})
        except OSError as error:
            return json_response({"error": str(error)})

    async def stop(self, request: Request) -> ASGIApp:
        await self._end(request.path_params["id"])
        return json_response({})

    async def _end(self, id: str) -> None:
        if (lease := self.leases.pop(id, None)) is not None:
            self._free_place()
            await lease.stop()

    async def end_leases(self) -> None:
        """Stops sandboxes whose clients are gone."""
        while True:
            await anyio.sleep(self.lease_s / BEATS_PER_LEASE)
            now = anyio.current_time()
            ended = [self.leases.pop(id) for id, lease in [*self.leases.items()] if lease.ends < now]
            self._free_place()
            async with anyio.create_task_group() as tasks:
                for lease in ended:
                    tasks.start_soon(lease.stop)

    async def stop_all(self) -> None:
        """Stops all sandboxes."""
        async with anyio.create_task_group() as tasks:
            while self.leases:
                tasks.start_soon(self.leases.popitem()[1].stop)


def build_app(server: SandboxServer, settings: Settings) -> ASGIApp:
    """The application: six verbs, and the sign of life."""
    return SecurityMiddleware(
        Router(
            {
                f"{PATH}/{{id}}/run": Endpoint({"POST": server.run}),
                f"{PATH}/{{id}}/put": Endpoint({"POST": server.put}),
                f"{PATH}/{{id}}/freeze": Endpoint({"POST": server.freeze}),
                f"{PATH}/{{id}}/get": Endpoint({"POST": server.get}),
                f"{PATH}/{{id}}": Endpoint({"DELETE": server.stop}),
                f"{PATH}/renew": Endpoint({"POST": server.renew}),
                PATH: Endpoint({"GET": server.count, "POST": server.start}),
            }
        ),
        settings,
    )


async def _read_model(request: Request, model: type[M]) -> M:
    body = await request.read_body()
    return parse_body(model, body) if len(body) <= LARGE_BYTES else await run_beside(parse_body, model, body)


async def _decode(text: str) -> bytes:
    try:
        return await decode_base64(text)
    except ValueError:
        raise Problem(422, "invalid_request", "This is no base64.") from None


@asynccontextmanager
async def serving(
    settings: Settings,
    most: int,
    lease_s: float,
    stop: StopSignal,
    provider: SandboxProvider | None = None,
    allowed_hosts: HostRules = NO_HOSTS,
) -> AsyncIterator[tuple[str, SandboxServer]]:
    """Serves during the block; gives the address."""
    check_token_required(settings)
    settings = settings.model_copy(update={"body_bytes": BODY_BYTES})
    reaper = Reaper()
    server = SandboxServer(provider or BubblewrapProvider(reaper), most, lease_s, allowed_hosts)
    with bind_socket(settings) as listening:
        ready = anyio.Event()
        config: uvicorn.Config = make_uvicorn_config(build_app(server, settings), settings)
        http = Server(config, ready.set)
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(http.serve, [listening])
                tasks.start_soon(server.end_leases)
                tasks.start_soon(server.disconnects.run)
                await ready.wait()
                stop.serving = True
                yield server_url(settings, listening), server
                http.should_exit = True
                await server.stop_all()
                tasks.cancel_scope.cancel()
        finally:
            with anyio.CancelScope(shield=True):
                await server.stop_all()
                await reaper.stop()


def read_hosts(entries: Sequence[str]) -> HostRules:
    """The hosts of `--allow-host`; raises ConfigError."""
    try:
        return HostRules(entries)
    except ValueError as error:
        remedy = "write names such as `pypi.org`, `*.pypi.org` or `10.0.0.5:8080`"
        raise ConfigError(str(error), field="--allow-host", remedy=remedy) from error


def serve_sandboxes(
    settings: Settings, most: int, lease_s: float, allowed_hosts: HostRules, ready: Callable[[str], None]
) -> None:
    """Serves until SIGTERM or SIGINT."""

    async def main() -> None:
        stop = StopSignal()
        async with anyio.create_task_group() as tasks:
            await tasks.start(stop_on_signals, stop)
            with stop.scope:
                async with serving(settings, most, lease_s, stop, allowed_hosts=allowed_hosts) as (url, _):
                    ready(url)
                    await stop.requested.wait()
            tasks.cancel_scope.cancel()

    anyio.run(main)
