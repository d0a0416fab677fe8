"""Serves the policy alone: to requests without a session, and to sessions whose rollouts are kept when they end."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from typing import Any, Self

import anyio
from starlette.types import ASGIApp

from gateway.http.security import SecurityMiddleware
from gateway.http.settings import Settings as HttpSettings
from gateway.http.settings import check_token_required
from mtrl_plugins.agents.agent_host import AgentHost, KeyedSecurity
from mtrl_plugins.agents.agent_runner import AgentRunner, with_agents
from mtrl_plugins.agents.agent_session import AgentSession, RolloutIdentity
from mtrl_plugins.agents.describe_task import describe_task
from mtrl_plugins.agents.policy_request import PolicyProblem, require
from mtrl_plugins.agents.settings import AgentSettings
from mtrl_plugins.agents.shared_session import SharedSession
from trainer.rollout.loop import RolloutRunner
from trainer.rollout.rollout import Rollout, StopReason
from trainer.rollout.task import Task

MOST_SESSIONS = 4096
MOST_TURNS = 1_000_000_000
ID_LENGTH = 200
OPEN_S = 60.0
END_S = 5.0
"""How long the rollouts of sessions that are open at the end may take to be kept."""
Sink = Callable[[Rollout], Awaitable[None]]


class PolicyServer(AgentHost):
    """An async context manager: the policy is served inside. Without a token, any key is accepted."""

    shutdown_s = 1

    def __init__(self, settings: AgentSettings, runner: RolloutRunner, token: str, sink: Sink) -> None:
        check_token_required(HttpSettings.model_validate({"host": settings.host, "token": token or None}))
        super().__init__(settings, token)
        self.runner: AgentRunner = with_agents(runner, self)
        self.rollouts = 0
        """The rollouts that were kept."""
        self.abandoned = 0
        """The sessions that were ended because their programs sent nothing more."""
        self._sink = sink
        self._number = 0
        self._opened: dict[str, anyio.Event] = {}
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        endless = self.runner.limits.model_copy(update={"assistant_turns": MOST_TURNS})
        runner = with_agents(self.runner, self, limits=endless)
        self.endpoint.shared = SharedSession(runner, self.settings, RolloutIdentity("shared"), api_key=self.run_key)
        await super().__aenter__()
        self._tasks = await self._stack.enter_async_context(anyio.create_task_group())
        return self

    async def __aexit__(self, *error: Any) -> bool | None:
        for session in [*self.endpoint.sessions.values()]:
            session.stop = session.stop or (StopReason.CANCELLED, "the server was stopped")
            session.ended.set()
        try:
            self._tasks.cancel_scope.deadline = anyio.current_time() + END_S
            await self._stack.aclose()
        finally:
            await super().__aexit__(*error)
        return None

    async def wait_for_program(self, session: AgentSession) -> bool:
        """A session is opened by its program."""
        self._opened[session.id].set()
        return True

    async def _hand_out(self, body: Mapping[str, Any]) -> AgentSession:
        """A new session, whose rollout is kept when it ends."""
        if len(self._opened) >= MOST_SESSIONS:
            raise PolicyProblem("unavailable", f"{MOST_SESSIONS} sessions are open: end some (`POST .../end`)")
        self._number += 1
        task = _read_task(body, self._number)
        session = AgentSession(self.runner, self.settings, RolloutIdentity(f"{task.id}/{self._number}"))
        session.opening = {"task": describe_task(task)}
        opened = self._opened[session.id] = anyio.Event()
        self._tasks.start_soon(self._play, task, session)
        try:
            with anyio.move_on_after(OPEN_S):
                await opened.wait()
            if session.id not in self.endpoint.sessions:
                raise PolicyProblem("unavailable", "the session cannot be opened; the server's output says why")
        except BaseException:
            session.ended.set()  # Its program will not come back to end it.
            raise
        return session

    async def _play(self, task: Task, session: AgentSession) -> None:
        opened = self._opened[session.id]
        try:
            rollout = await self.runner.play(task, session)
            self.abandoned += session.use.abandoned
            if opened.is_set() and session.tree.turns:
                await self._sink(rollout)
                self.rollouts += 1
        finally:
            opened.set()
            del self._opened[session.id]

    def _announce(self) -> None:
        """The command prints the address itself."""

    def _secure(self, settings: HttpSettings) -> ASGIApp:
        return (KeyedSecurity if self.run_key else SecurityMiddleware)(self.endpoint.app, settings)


def _read_task(body: Mapping[str, Any], number: int) -> Task:
    """The task that the program names; it may name none."""
    about = body.get("task") or {}
    require(isinstance(about, Mapping), "must be an object", "task")
    id, prompt = about.get("id", f"session-{number}"), about.get("prompt", "")
    require(isinstance(id, str) and 0 < len(id) <= ID_LENGTH, "must be a short text", "task.id")
    require(isinstance(prompt, str), "must be a text", "task.prompt")
    return Task(id, ({"role": "user", "content": prompt},) if prompt else (), columns=dict(about))
