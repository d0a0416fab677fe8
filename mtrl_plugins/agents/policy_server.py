"""Serves the policy alone (`mtrl-train serve-policy`): without a session, and to sessions whose rollouts are saved."""

from __future__ import annotations

import json
import signal
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self

import anyio
from anyio import to_thread
from rich.console import Console
from starlette.types import ASGIApp

from gateway.disk_errors import write_atomically
from gateway.errors import ConfigError
from gateway.http.security import SecurityMiddleware
from gateway.http.settings import Settings as HttpSettings
from gateway.http.settings import check_token_required
from gateway.version import installed_version
from mtrl_plugins.agents.agent_host import AgentHost, KeyedSecurity
from mtrl_plugins.agents.agent_runner import AgentRunner, describe_task, with_agents
from mtrl_plugins.agents.agent_session import AgentSession, RolloutIdentity
from mtrl_plugins.agents.requests import PolicyAnswer, PolicyProblem, PolicyRequest, require
from mtrl_plugins.agents.settings import AgentSettings
from mtrl_plugins.agents.turn_stream import TurnListener
from trainer.collect_rollouts import create_run_folder
from trainer.engines import engine_notes, make_engine
from trainer.rollout.loop import RolloutRunner
from trainer.rollout.rollout import Rollout, StopReason
from trainer.rollout.settings import BaseRolloutSettings, ModelPath, RolloutLimits
from trainer.rollout.task import Task
from trainer.setup import load_template, make_gateway, make_sampling, make_stepper, probe_for_job, trust_model
from trainer.storage.rollout_file import RolloutWriter
from trainer.storage.run_files import RUN_INFO_FILE

KEPT_TURNS = 1_000
"""Once there are twice as many turns, the oldest are forgotten. A chat that goes on from one is rendered anew."""


@dataclass
class SharedSession(AgentSession):
    """A session that never ends. An engine that failed once is asked again."""

    kept_turns: int = KEPT_TURNS

    async def answer(self, request: PolicyRequest, listener: TurnListener | None = None) -> PolicyAnswer:
        """The policy's turn in answer to a request. Raises PolicyProblem."""
        try:
            return await super().answer(request, listener)
        finally:
            if len(self.tree.turns) >= 2 * self.kept_turns:
                self.forget(self.kept_turns)

    def _stop(self, stop: StopReason, reason: str = "") -> None:
        """Nothing ends this session; the request that met the failure is told."""


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


WIDE = RolloutLimits(assistant_turns=100_000, turn_tokens=1 << 20, rollout_tokens=1 << 20, timeout_s=86_400.0)
"""The limits where a run file sets none: what the model takes."""


class ServeSettings(BaseRolloutSettings):
    """Settings of `mtrl-train serve-policy`; other settings of a run file do not matter here."""

    model: ModelPath
    """A model's folder."""
    out: Path | None = None
    """Where rollouts of sessions are saved."""
    tools: str | tuple[str, ...] = ()
    """Tools of the gateway for sessions; by default none, as agents bring their own."""
    limits: RolloutLimits = WIDE


async def serve_policy(settings: ServeSettings, agent: AgentSettings, token: str, console: Console) -> None:
    """Serves until SIGTERM or SIGINT. Everything is checked before the weights are loaded."""
    say = partial(console.print, markup=False, soft_wrap=True, highlight=False)
    if not settings.model.is_dir():
        remedy = "name a folder as `save_pretrained` writes it, a run's folder, or a demo's name"
        raise ConfigError("there is no such folder", file=settings.model, field="--model", remedy=remedy)
    if settings.out is not None:
        create_run_folder(settings.out)
    async with AsyncExitStack() as stack:
        gateway = await stack.enter_async_context(make_gateway(settings))
        trust_model(settings, settings.model)
        template = load_template(settings.model, settings.template, gateway.specs)
        probe_for_job(template, settings, gateway.specs, []).raise_if_failed()
        engine = make_engine(settings, settings.model, template, settings.out or Path(), log=say)
        sampling, stepper = make_sampling(settings), make_stepper(settings)
        runner = RolloutRunner(engine, template, gateway, settings.limits, sampling, stepper, seed=settings.seed)
        sink = _save_nothing if settings.out is None else _save(stack.enter_context(RolloutWriter(settings.out)))
        server = PolicyServer(agent, runner, token, sink)
        stack.enter_context(server.bind())
        await stack.enter_async_context(engine)
        if settings.out is not None:
            about: dict[str, Any] = {"mtrl": installed_version(), "engine": engine.capabilities.name}
            about["settings"] = settings.model_dump(mode="json")
            write_atomically(settings.out / RUN_INFO_FILE, (json.dumps(about, indent=2) + "\n").encode())
        for note in engine_notes(engine.capabilities):
            say(note)
        await _serve_until_signal(server, settings, say)


async def _serve_until_signal(server: PolicyServer, settings: ServeSettings, say: Callable[[str], None]) -> None:
    with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        async with server:
            for line in describe_server(server, settings):
                say(line)
            await anext(signals)
    if server.abandoned:
        say(f"{server.abandoned} sessions were ended after {server.settings.idle_s:g} s without a request")
    if settings.out is not None:
        say(f"{server.rollouts} rollouts are saved in {settings.out}; read them with: mtrl-train show {settings.out}")


def describe_server(server: PolicyServer, settings: ServeSettings) -> list[str]:
    """The lines at the start: where the policy is, and how clients reach it."""
    url = server.endpoint.url
    key = "the token" if server.run_key else "any"
    limit = server.endpoint.shared.context_length if server.endpoint.shared else 0
    kept = f"saved in {settings.out}" if settings.out else "not saved: there is no --out"
    return [
        f"mtrl-train: {url} ({settings.model}, {limit} tokens; stop with Ctrl-C)",
        f"  OpenAI clients     OPENAI_BASE_URL={url}/v1  OPENAI_API_KEY={key}",
        f"  Anthropic clients  ANTHROPIC_BASE_URL={url}  ANTHROPIC_API_KEY={key}",
        f"  Google clients     GOOGLE_GEMINI_BASE_URL={url}  GEMINI_API_KEY={key}",
        f"  sessions           POST {url}/sessions; their rollouts are {kept}",
    ]


def _save(writer: RolloutWriter) -> Sink:
    async def save(rollout: Rollout) -> None:
        with anyio.CancelScope(shield=True):
            await to_thread.run_sync(writer.add, rollout)

    return save


async def _save_nothing(rollout: Rollout) -> None:
    """For servers without a folder."""
