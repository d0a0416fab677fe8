"""The toolset of environments with `reset` and `step`: a session is an episode, a call is a step.

`environment_reset` is for the training loop, which calls it first; so everything an episode says is on a tape.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from math import fsum
from types import TracebackType
from typing import Any, Self

import anyio

from gateway.schema import parse_arguments
from gateway.toolset import Session
from gateway.types import DEFAULT_CONTEXT, Audience, Context, Outcome, Part, Task, Text, ToolCall, ToolResult, ToolSpec
from mtrl_plugins.environments.episodes import Episode, EpisodeAnswer, EpisodeSource
from mtrl_plugins.environments.host_process import EnvironmentFailed
from mtrl_plugins.environments.settings import EpisodeSettings

RESET, TEXT_STEP = "environment_reset", "environment_step"
"""The tools that only the training loop may call: to begin an episode, and to act with the text of a turn."""
ANY_OBJECT: Mapping[str, Any] = {"type": "object", "properties": {}}
CLOSE_S = 10.0
"""How long an episode may take to close."""


class EpisodeToolset:
    """One environment as a toolset."""

    def __init__(self, settings: EpisodeSettings, source: EpisodeSource) -> None:
        self.settings, self.source = settings, source
        self.specs: Sequence[ToolSpec] = ()
        self.slots: anyio.Semaphore | None = None
        """Free places for episodes."""

    async def __aenter__(self) -> Self:
        await self.source.__aenter__()
        self.slots = anyio.Semaphore(self.settings.sessions)
        own = [self._spec(RESET, "Begins an episode.", ANY_OBJECT, "loop")]
        if self.settings.actions == "text":
            own.append(self._spec(TEXT_STEP, "Acts with the text of the policy's turn.", ANY_OBJECT, "loop"))
            self.specs = own
        else:
            tools = self.source.tools
            self.specs = [
                *(self._spec(tool["name"], tool["description"], tool["parameters"], "policy") for tool in tools),
                *own,
            ]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        return await self.source.__aexit__(kind, error, trace)

    @asynccontextmanager
    async def open(self, task: Task) -> AsyncIterator[Session]:
        session = EpisodeSession(self)
        try:
            yield session
        finally:
            with anyio.move_on_after(CLOSE_S, shield=True):
                await session.close()

    def _spec(self, name: str, description: str, parameters: Mapping[str, Any], audience: Audience) -> ToolSpec:
        return ToolSpec(name, description, parameters, audience, owner=self.settings.name)


class EpisodeSession:
    """One episode. Calls of one turn are steps, one after the other."""

    def __init__(self, toolset: EpisodeToolset) -> None:
        self._toolset, self._settings = toolset, toolset.settings
        self._stack = AsyncExitStack()
        self._episode: Episode | None = None
        self._lock = anyio.Lock()
        self._steps = 0
        self._rewards: list[float] = []
        self._ended = ""
        """How the episode ended."""

    @property
    def specs(self) -> Sequence[ToolSpec]:
        return self._toolset.specs

    async def call(self, call: ToolCall, context: Context = DEFAULT_CONTEXT) -> ToolResult:
        arguments = parse_arguments(call.arguments)
        async with self._lock:
            try:
                if call.name == RESET:
                    return await self._reset(int(arguments["seed"]), arguments.get("options") or {})
                return await self._step("" if call.name == TEXT_STEP else call.name, arguments)
            except EnvironmentFailed as error:
                self._ended = "its environment failed"
                return ToolResult((Text("The environment failed."),), Outcome.UNAVAILABLE, reason=str(error))

    async def finish(self) -> Mapping[str, float]:
        """Nothing: each step has its reward."""
        return {}

    async def close(self) -> None:
        """Ends the episode."""
        await self._stack.aclose()

    async def _reset(self, seed: int, options: Mapping[str, Any]) -> ToolResult:
        """Begins the episode, as soon as there is a place for it."""
        slots, wait_s = self._toolset.slots, self._settings.wait_s
        if slots is None or self._episode is not None:
            raise EnvironmentFailed(f"{self._settings.name}: the session has an episode already")
        with anyio.move_on_after(wait_s) as scope:
            await slots.acquire()
        if scope.cancelled_caught:
            framework = self._settings.framework
            problem = f"{self._settings.name}: none of {self._settings.sessions} sessions was free within {wait_s:g} s"
            raise EnvironmentFailed(f"{problem}\n  remedy: raise `{framework}.sessions` or `{framework}.wait_s`")
        self._stack.callback(slots.release)
        self._episode, answer = await self._stack.enter_async_context(self._toolset.source.open(seed, options))
        if answer.terminated or answer.truncated:
            problem = f"{self._settings.name} ended an episode before the policy's first turn (seed {seed})"
            raise EnvironmentFailed(f"{problem}: {ToolResult(answer.parts).text}")
        return self._result(replace(answer, reward=None))

    async def _step(self, tool: str, action: Mapping[str, Any]) -> ToolResult:
        if self._episode is None or self._ended:
            text = f"The episode is over: {self._ended or 'it has not begun'}."
            return ToolResult((Text(text),), Outcome.ERROR, done=bool(self._ended))
        answer = await self._episode.step(tool, action)
        if answer.invalid:
            return ToolResult((Text(answer.invalid),), Outcome.INVALID, reason="the action is not in the action space")
        self._steps += 1
        self._rewards.append(answer.reward or 0.0)
        if self._steps >= self._settings.max_steps and not answer.terminated:
            answer = replace(answer, truncated=True)
        return self._result(answer)

    def _result(self, answer: EpisodeAnswer) -> ToolResult:
        """What the policy reads, and what the operator does."""
        notes = []
        if answer.reward is not None and self._settings.show_reward:
            notes.append(f"reward: {answer.reward:g}")
        if answer.terminated:
            self._ended = "it has ended"
        elif answer.truncated:
            self._ended = f"it was cut off after {self._steps} steps"
        if self._ended:
            notes.append(f"The episode is over: {self._ended}.")
        parts: tuple[Part, ...] = (*answer.parts, *(Text(note) for note in notes))
        metrics = {
            "steps": self._steps,
            "return": fsum(self._rewards),
            "terminated": answer.terminated,
            "truncated": answer.truncated and not answer.terminated,
        }
        return ToolResult(parts, reward=answer.reward, done=bool(self._ended), metrics=metrics)


def reset_call(seed: int, options: Mapping[str, Any]) -> ToolCall:
    """The call that begins an episode."""
    return ToolCall("reset", RESET, json.dumps({"seed": seed, **({"options": dict(options)} if options else {})}))


def text_call(text: str, number: int) -> ToolCall:
    """The call that acts with the text of a turn."""
    return ToolCall(f"turn_{number}", TEXT_STEP, json.dumps({"text": text}))
