"""Runs rollouts that an agent plays: opens a session, runs the agent, and makes a rollout of the policy's turns."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, fields, replace
from typing import Any

import anyio

from gateway.errors import ConfigError, GatewayError, format_error, safe_repr, unwrap_error
from gateway.feedback.base import plain_text
from gateway.native.thread_pool import shared_threads
from gateway.session import AnySession
from gateway.types import EMPTY
from gateway.user_code import UserCode
from gateway.wire import to_plain
from mtrl_plugins.agents.agent_box import URL, AgentBox
from mtrl_plugins.agents.agent_host import AgentHost
from mtrl_plugins.agents.agent_process import run_agent
from mtrl_plugins.agents.agent_session import AgentSession, RolloutIdentity
from trainer.rollout.loop import RolloutRunner, Slot, sum_rewards
from trainer.rollout.rollout import Rollout, Span, StopReason
from trainer.rollout.task import Task

TRUTH_COLUMNS = frozenset({"reward_model", "ground_truth", "answer", "solution", "truth"})
"""Columns that hold the right answer in the data sets of several frameworks."""


def prompt_text(task: Task) -> str:
    """The last question as text."""
    asked = (message for message in reversed(task.messages) if message["role"] == "user")
    return plain_text(next(asked, {}).get("content"))


def ask_instead(task: Task, question: str) -> Task:
    """The task with another question after the messages of the system."""
    kept = (message for message in task.messages if message["role"] in ("system", "developer"))
    return replace(task, messages=(*kept, {"role": "user", "content": question}))


def describe_task(task: Task) -> dict[str, Any]:
    """The task in JSON types."""
    columns = {name: value for name, value in task.columns.items() if name not in TRUTH_COLUMNS}
    messages = [{**message, "content": plain_text(message.get("content"))} for message in task.messages]
    return {"id": task.id, "prompt": prompt_text(task), "messages": messages, "columns": to_plain(columns)}


@dataclass(frozen=True)
class AgentHandle:
    """What an agent's function has besides the base URL: the key, the rollout's tools, and where rewards go."""

    _session: AgentSession
    tools: AnySession
    """The gateway's session of this rollout: `await session.tools.call(...)`."""
    description: Mapping[str, Any]

    @property
    def api_key(self) -> str:
        """The key for the endpoint."""
        return self._session.api_key

    @property
    def anthropic_base_url(self) -> str:
        """The base URL for clients of Anthropic."""
        return str(self.description["anthropic_base_url"])

    @property
    def model(self) -> str:
        """The name of the model."""
        return str(self.description["model"])

    def reward(self, value: float, name: str = "agent") -> None:
        """Gives the rollout a reward."""
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise TypeError(f"a reward must be a finite number, not {safe_repr(value)}")
        self._session.rewards[name] = float(value)


log = logging.getLogger(__name__)


@dataclass(frozen=True)
class AgentRunner(RolloutRunner):
    """Runs rollouts with agents instead of the rollout loop."""

    host: AgentHost = field(kw_only=True)

    async def run(
        self, task: Task, *, group: str = "", index: int = 0, attempt: int = 0, slot: Slot | None = None
    ) -> Rollout:
        """Runs one rollout. Failures become stop reasons, not exceptions."""
        key = f"{group}/{task.id}/{index}" + (f".{attempt}" if attempt else "")
        session = AgentSession(self, self.host.settings, RolloutIdentity(key, group), slot or nullcontext())
        session.opening = {"rollout": key, "task": describe_task(task)}
        return await self.play(task, session, group, index)

    async def play(self, task: Task, session: AgentSession, group: str = "", index: int = 0) -> Rollout:
        """Runs one rollout in the session."""
        rollout = await _AgentRollout(self, task, session).run()
        rollout = replace(rollout, group=group, index=index)
        self.observer.on_end(session.identity.key, rollout)
        return rollout


def with_agents(runner: RolloutRunner, host: AgentHost, **changes: Any) -> AgentRunner:
    """A runner like this one, whose rollouts agents play."""
    shared = {field.name: getattr(runner, field.name) for field in fields(RolloutRunner)}
    return AgentRunner(**shared | changes, host=host)


@dataclass
class _AgentRollout:
    """The state of one rollout."""

    runner: AgentRunner
    task: Task
    session: AgentSession
    rewards: dict[str, float] = field(default_factory=dict)
    infos: dict[str, Any] = field(default_factory=dict)
    box: AgentBox | None = None
    """What the agent's program is confined by."""

    async def run(self) -> Rollout:
        started = time.perf_counter()
        limits = self.runner.limits
        stop, reason = StopReason.WALL_TIME, f"not finished within {limits.timeout_s:g} s"
        self.runner.observer.on_state(self.session.identity.key, "pending")
        with anyio.CancelScope() as scope:
            stop, reason = await self._run_session(scope) or (stop, reason)
        *earlier, ledger = self.session.tree.ledgers()
        elapsed_s = time.perf_counter() - started
        return Rollout(
            task=self.task.id,
            kind=self.task.kind,
            ledger=ledger,
            stop=stop,
            rewards=EMPTY if stop.is_infrastructure else self.rewards,
            reason=reason,
            timing={"calling": elapsed_s},
            timeline=(Span("calling", 0.0, round(elapsed_s, 6)),),
            infos=self.infos | self._describe_session(),
            earlier=tuple(earlier),
        )

    async def _run_session(self, scope: anyio.CancelScope) -> tuple[StopReason, str]:
        try:
            task = replace(self.task.session_task, rollout=self.session.identity.key)
            async with self.runner.gateway.open(task) as tools:
                self.session.tools = tools
                async with self.runner.host.open_box(self.session, self.task, tools) as self.box:
                    stop, reason = await self._play_steps(tools, scope)
                await tools.finish()
                self.rewards = {**self.session.rewards}
                for kind, value in sum_rewards(tools.rewards, self.infos).items():
                    self.rewards[kind] = self.rewards.get(kind, 0.0) + value
                return stop, reason
        except Exception as error:  # boundary: an agent may do anything; other rollouts continue
            inner = unwrap_error(error)
            if isinstance(inner, GatewayError):  # A wrong setting is that of the agent: its program, or its root.
                return StopReason.AGENT_FAILED if isinstance(inner, ConfigError) else StopReason.TOOL_FAILED, str(inner)
            log.exception("rollout %s failed", self.session.identity.key)
            return StopReason.ERROR, format_error(inner)

    async def _play_steps(self, tools: AnySession, scope: anyio.CancelScope) -> tuple[StopReason, str]:
        """Runs the agent, once for each step of the task, and grades what it leaves in its box."""
        session, opening = self.session, self.session.opening
        question = None if self.box is None else await self.box.task.begin()
        while True:
            if question is not None:
                session.opening = {**opening, "task": describe_task(ask_instead(self.task, question))}
            session.closed = False
            with self.runner.host.open(session):
                try:
                    stop, reason = await self._play(tools, scope)
                finally:
                    await session.end_requests()
            if self.box is None or stop.is_infrastructure:
                return stop, reason
            question = await self._grade(self.box, scope)
            if question is None:
                return stop, reason

    async def _grade(self, box: AgentBox, scope: anyio.CancelScope) -> str | None:
        """Grades what the agent left, in the grader's own time: the rollout's stands still. Returns what is asked
        next, if anything is."""
        rest_s, scope.deadline = scope.deadline - anyio.current_time(), math.inf
        rewards, infos, question = await box.task.end(is_last=self.session.stop is not None)
        scope.deadline = anyio.current_time() + rest_s
        self.session.rewards |= rewards
        self.infos |= infos
        return question

    async def _play(self, tools: AnySession, scope: anyio.CancelScope) -> tuple[StopReason, str]:
        """Runs the agent until it ends, or the time is over."""
        settings, wall_s = self.runner.host.settings, self.runner.limits.timeout_s
        if settings.external and not await self.runner.host.wait_for_program(self.session):
            return StopReason.AGENT_FAILED, f"no program opened a session within {settings.open_s:g} s"
        scope.deadline = min(scope.deadline, anyio.current_time() + wall_s)
        failure = ""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._cancel_after_stop, tasks.cancel_scope)
            failure = await self._run_agent(tools)
            tasks.cancel_scope.cancel()
        return self.session.stop or self._judge(failure)

    async def _cancel_after_stop(self, agent: anyio.CancelScope) -> None:
        """Ends an agent that goes on although the policy writes nothing more."""
        await self.session.stopped.wait()
        await anyio.sleep(self.runner.host.settings.stop_s)
        agent.cancel()

    async def _run_agent(self, tools: AnySession) -> str:
        """Runs the agent; returns how it failed."""
        settings = self.runner.host.settings
        if settings.external:
            return await self._wait_for_end(settings.idle_s)
        if settings.function:
            return await self._call_function(tools)
        host, about = self.runner.host, self.runner.host.endpoint.describe(self.session, URL if self.box else "")
        if self.box is not None:
            ended = await self.box.run(about, self.runner.limits.timeout_s)
        else:
            ended = await run_agent(settings, about, host.reaper)
        self.infos |= {"agent_output": ended.output, "agent_exit": ended.code}
        if ended.is_late:
            self.infos["agent_failure"] = "the time that the task gives was over"
        return "" if ended.is_late or ended.code == 0 else f"the agent {ended.describe()}"

    async def _wait_for_end(self, idle_s: float) -> str:
        """Waits until the session's program ends it, or sends nothing for too long."""
        use = self.session.use
        use.touch()
        while not use.abandoned:
            with anyio.move_on_after(use.remaining_s(idle_s)):
                await self.session.ended.wait()
                return ""
            use.abandoned = use.remaining_s(idle_s) == 0
        failure = f"its program sent no request for {idle_s:g} s (`idle_s`)"
        log.warning("the session of rollout %s was ended: %s", self.session.identity.key, failure)
        return failure

    async def _call_function(self, tools: AnySession) -> str:
        """Calls the agent's function; returns what it raised."""
        endpoint, settings = self.runner.host.endpoint, self.runner.host.settings
        handle = AgentHandle(self.session, tools, endpoint.describe(self.session))
        try:
            with UserCode():
                url, host = endpoint.base_url(self.session), self.runner.host  # What is not async runs in a thread.
                value = await shared_threads().run(host.function, url, self.task, handle, **settings.args)
                if value is not None:
                    handle.reward(value)
        except Exception as error:  # boundary: users wrote the agent
            log.info("the agent of rollout %s failed", self.session.identity.key, exc_info=error)
            return f"the agent raised {format_error(error)}"
        return ""

    def _judge(self, failure: str) -> tuple[StopReason, str]:
        """What the agent's end means."""
        if self.session.overflow:
            return StopReason.LENGTH_ROLLOUT, self.session.overflow
        if not self.session.tree.turns:
            return StopReason.AGENT_FAILED, failure or "the agent ended without asking the policy for anything"
        if failure and self.runner.host.settings.on_failure == "lost":
            return StopReason.AGENT_FAILED, failure
        if failure:
            self.infos["agent_failure"] = failure
        return StopReason.DONE, ""

    def _describe_session(self) -> dict[str, Any]:
        """What the endpoint saw, for reward functions and metrics."""
        tree, sampled = self.session.tree, self.session.sampled
        seen: dict[str, Any] = {"changed_by_agent": {str(change): count for change, count in tree.changed.items()}}
        seen |= {"requests": dict(self.session.counts), "branches": len(tree.ledgers())}
        tokens = {"sampled": sampled.count, "discarded": sampled.discarded, "retokenised": sampled.retokenised}
        return {"agent": seen | tokens}
