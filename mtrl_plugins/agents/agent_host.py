"""Serves the endpoint for agents during a run, and gives waiting rollouts to programs that open sessions."""

from __future__ import annotations

import json
import os
import secrets
import sys
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, closing, contextmanager, suppress
from itertools import count
from pathlib import Path
from socket import socket
from typing import Any, Self, cast
from urllib.parse import urlsplit

import anyio
import uvicorn
from anyio import to_thread
from anyio.abc import TaskGroup, TaskStatus

from gateway.errors import ConfigError
from gateway.http.security import SecurityMiddleware
from gateway.http.settings import Settings as HttpSettings
from gateway.http.uvicorn_server import Server, bind_socket, make_uvicorn_config, server_url
from gateway.process.reaper import Reaper
from gateway.sandbox.provider import BubblewrapProvider
from gateway.sandbox.socket_handover import SocketHandover
from gateway.session import AnySession
from gateway.types import EMPTY
from mtrl_plugins.agents.agent_box import (
    AgentBox,
    EndpointProvider,
    RowTask,
    box_of_task,
    choose_box,
    find_boxed_task,
    find_program,
)
from mtrl_plugins.agents.agent_process import work_folder
from mtrl_plugins.agents.agent_session import AgentSession
from mtrl_plugins.agents.endpoint import AgentEndpoint, BoxApp
from mtrl_plugins.agents.requests import PolicyProblem
from mtrl_plugins.agents.settings import AgentSandbox, AgentSettings
from trainer.load_plugin import load_plugin
from trainer.rollout.loop import RolloutRunner
from trainer.rollout.task import Task

OPEN_TIMEOUT_S = 60.0
"""How long a program that opens a session waits for a rollout."""
BODY_BYTES = 64 * 1024 * 1024
SHUTDOWN_TIMEOUT_S = 2
"""How long requests under way may take at the end."""
BOX_CONNECTIONS = 64
"""How many connections the processes of one box may have; each takes a descriptor here."""
IDLE_S = 600
"""How long an idle connection is kept; agents think, or run tools, between two requests."""


class AgentHost:
    """An async context manager: the endpoint is served inside."""

    def __init__(self, settings: AgentSettings, run_key: str | None = None, *, are_tasks_boxed: bool = False) -> None:
        """`are_tasks_boxed`: the tasks are those of an environment, which have boxes of their own."""
        self.settings = settings
        self.run_key = f"mtrl-run-{secrets.token_urlsafe(24)}" if run_key is None else run_key
        self.endpoint = AgentEndpoint(self.run_key, self._hand_out)
        self.function: Any = load_plugin(settings.function, "agent.function") if settings.function else None
        """The agent, if it is a function."""
        if self.function is not None and not callable(self.function):
            raise ConfigError("is no function", field="agent.function", remedy="name `my_agent.py:run`")
        self.box = None if are_tasks_boxed else choose_box(settings)
        """What programs are confined by, if they are."""
        self.reaper = Reaper()
        """Ends agents that are programs even if this process is killed."""
        self._waiting: list[tuple[AgentSession, anyio.Event]] = []
        self._arrived = anyio.Event()
        self.programs = 0
        """How many requests for a session there were."""
        self._is_over = False
        self._listening: socket | None = None
        self._opened_at = 0.0
        """When a program last opened a session."""
        self._tasks: TaskGroup
        self._server: _AgentServer
        self._serving = self._serve()

    async def __aenter__(self) -> Self:
        await self._serving.__aenter__()
        return self

    async def __aexit__(self, *error: Any) -> bool | None:
        try:
            return await self._serving.__aexit__(*error)
        finally:
            await self.reaper.stop()

    def wrap(self, runner: RolloutRunner) -> RolloutRunner:
        """A runner like this one, whose rollouts agents play."""
        from mtrl_plugins.agents.agent_runner import with_agents

        return with_agents(runner, self)

    def describe(self) -> str:
        """Nothing: agents have no state of their own."""
        return ""

    def take_metrics(self) -> Mapping[str, float]:
        """None: metrics of agents are those of their rollouts."""
        return EMPTY

    @contextmanager
    def open(self, session: AgentSession) -> Iterator[AgentSession]:
        """Serves a session."""
        self.endpoint.sessions[session.id] = session
        try:
            yield session
        finally:
            session.closed = True
            del self.endpoint.sessions[session.id]

    @asynccontextmanager
    async def open_box(self, session: AgentSession, task: Task, tools: AnySession) -> AsyncIterator[AgentBox | None]:
        """The box of a rollout's program, if it has one. Raises ConfigError and Unavailable."""
        boxed = find_boxed_task(tools)
        if boxed is None and self.box is None:
            yield None
            return
        await self.reaper.start()
        names = [spec.name for spec in tools.specs] if boxed is not None else []
        async with AsyncExitStack() as stack:
            if boxed is None:
                boxed = RowTask(self.settings, box_of_task(cast(AgentSandbox, self.box), task), self.reaper)
                stack.push_async_callback(boxed.close)
            program = await to_thread.run_sync(find_program, self.settings, boxed.tools.settings, names)
            folder = await stack.enter_async_context(work_folder(None, self.reaper))
            numbers = count()

            def hand_over() -> Path:
                handover, serving = SocketHandover(folder / f"socket-{next(numbers)}"), anyio.CancelScope()
                stack.callback(serving.cancel)
                self._tasks.start_soon(self._serve_box, handover, session, serving)
                return handover.file

            provider = BubblewrapProvider(self.reaper)
            boxed.tools.provider = EndpointProvider(self.settings, program, provider, hand_over)
            await boxed.get_box()
            yield AgentBox(self.settings, program, boxed, self.reaper)

    async def _serve_box(self, handover: SocketHandover, session: AgentSession, scope: anyio.CancelScope) -> None:
        """Serves a session inside its box."""
        settings = self._http_settings()
        app = KeyedSecurity(BoxApp(self.endpoint.app, session), settings)
        config = make_uvicorn_config(app, settings, keep_alive_s=IDLE_S, shutdown_s=SHUTDOWN_TIMEOUT_S)
        config.load()
        with scope, closing(handover), suppress(OSError):  # Without its box nobody needs it.
            listening = await handover.receive()
            with listening:
                await self._server.accept(listening, config, BOX_CONNECTIONS)

    async def wait_for_program(self, session: AgentSession) -> bool:
        """Waits until a program has opened the session; False if none has opened any for too long."""
        taken = anyio.Event()
        self._waiting.append((session, taken))
        self._arrived.set()
        try:
            while not taken.is_set():
                with anyio.move_on_after(self.settings.open_s) as waiting:
                    await taken.wait()
                if waiting.cancelled_caught and self._opened_at + self.settings.open_s <= anyio.current_time():
                    return False
        finally:
            self._waiting = [one for one in self._waiting if one[1] is not taken]
        return True

    async def _hand_out(self, body: Mapping[str, Any]) -> AgentSession:
        """The rollout that has waited longest."""
        self.programs += 1
        with anyio.move_on_after(OPEN_TIMEOUT_S):
            while not self._waiting:
                if self._is_over:
                    raise PolicyProblem("ended", "the run has ended")
                self._arrived = anyio.Event()
                await self._arrived.wait()
            session, taken = self._waiting.pop(0)
            taken.set()
            self._opened_at = anyio.current_time()
            return session
        text = "no rollout waits for a program" if self.settings.external else "the run starts its agents itself"
        raise PolicyProblem("unavailable", f"{text}; ask again later")

    def _announce(self) -> None:
        """Tells programs elsewhere the address and the key for opening sessions."""
        file = self.settings.address_file
        if not self.settings.external:
            return
        if file is None:
            about = f"with the key {self.run_key}"
            sys.stderr.write(f"mtrl-train: agents open sessions at POST {self.endpoint.url}/sessions {about}\n")
            return
        try:
            file.unlink(missing_ok=True)
            with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as stream:
                json.dump({"url": self.endpoint.url, "api_key": self.run_key}, stream)
        except OSError as error:
            remedy = "name a file in a folder that exists"
            problem = f"cannot be written ({error.strerror})"
            raise ConfigError(problem, file=file, field="agent.address_file", remedy=remedy) from error

    def bind(self) -> socket:
        """Binds the port, unless that has been done; raises ConfigError if it is in use."""
        if self._listening is None:
            self._listening = bind_socket(self._http_settings())
        return self._listening

    def _http_settings(self) -> HttpSettings:
        public = urlsplit(self.settings.public_url or "").hostname or ""
        return HttpSettings(
            host=self.settings.host,
            port=self.settings.port,
            body_bytes=BODY_BYTES,
            allow_hosts=(self.settings.host, public),
        )

    @asynccontextmanager
    async def _serve(self) -> AsyncIterator[None]:
        settings = self._http_settings()
        with self.bind() as listening:
            self.endpoint.url = (self.settings.public_url or server_url(settings, listening)).rstrip("/")
            app = KeyedSecurity(self.endpoint.app, settings)
            config = make_uvicorn_config(app, settings, keep_alive_s=IDLE_S, shutdown_s=SHUTDOWN_TIMEOUT_S)
            async with self.endpoint.tools.run(), anyio.create_task_group() as tasks:
                tasks.start_soon(self.endpoint.disconnects.run)
                self._tasks, self._server = tasks, await tasks.start(_run_server, config, listening)
                server = self._server
                try:
                    self._announce()
                    yield
                finally:
                    if self.settings.address_file is not None:
                        self.settings.address_file.unlink(missing_ok=True)
                    self._is_over = True
                    self._arrived.set()
                    server.should_exit = True
                    with anyio.move_on_after(SHUTDOWN_TIMEOUT_S + 3, shield=True):
                        await server.exited.wait()
                    tasks.cancel_scope.cancel()


class KeyedSecurity(SecurityMiddleware):
    """Takes any Host, as every request needs a key, which a web page that is bound to another name does not know."""

    def _is_allowed_host(self, authority: bytes) -> bool:
        return True


class _AgentServer(Server):
    """A server whose end can be waited for."""

    exited: anyio.Event


async def _run_server(config: uvicorn.Config, listening: Any, *, task_status: TaskStatus[_AgentServer]) -> None:
    server = _AgentServer(config, lambda: task_status.started(server))
    server.exited = anyio.Event()
    try:
        await server.serve([listening])
    finally:
        server.exited.set()
