"""The stepper for environments in host processes: each turn of the policy is the answer of the environment's model.

The environment's own runner calls its tools, answers the policy and decides when a rollout is over.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from gateway.types import Outcome, ToolCall
from mtrl_plugins.environments.environment_messages import new_messages, read_messages, read_tools, write_turn
from mtrl_plugins.environments.environment_toolset import END_CALL, open_call, turn_call
from mtrl_plugins.environments.episode_stepper import INFO, LOOP
from mtrl_plugins.environments.host_process import EnvironmentFailed, host_key
from mtrl_plugins.environments.settings import RunnerSettings
from trainer.ledger import Author, Message
from trainer.rollout.rollout import StopReason
from trainer.rollout.steppers import RolloutEnd, RolloutStart, Step, Turn

ROW_COLUMN = "environment_row"
"""The column that says which row of the environment a task is."""


class EnvironmentStepper:
    """Begins a rollout of the environment for each of ours."""

    def __init__(self, settings: RunnerSettings) -> None:
        self.settings = settings

    @asynccontextmanager
    async def begin(self, start: RolloutStart) -> AsyncIterator[tuple[Step, EnvironmentRollout]]:
        """Opens the environment's rollout."""
        rollout = EnvironmentRollout(self.settings, start)
        yield await rollout.open(), rollout

    def check_finished(self, turn: Turn) -> bool:
        return False

    def step(self, turn: Turn) -> Step:
        raise NotImplementedError("call `begin` for each rollout")


class EnvironmentRollout:
    """One rollout, here and in the environment."""

    def __init__(self, settings: RunnerSettings, start: RolloutStart) -> None:
        self.settings, self.start = settings, start
        self.place: dict[str, Any] = {}
        """Where the reward finds the rollout in the host."""
        self.chat: tuple[Message, ...] = ()
        """The chat that the environment knows."""
        self.ended: dict[str, Any] | None = None
        """How the environment's rollout ended."""

    async def open(self) -> Step:
        """The environment's first request to its model."""
        row = self.start.task.columns.get(ROW_COLUMN)
        if not isinstance(row, dict):
            problem = f"{self.start.task.location}: is not a row of {self.settings.name}"
            raise EnvironmentFailed(f"{problem}\n  remedy: write `data: {self.settings.framework}`")
        opened = await self._call(open_call(row))
        if "ended" in opened:
            how = opened["ended"]
            problem = f"{self.settings.name} ended a rollout before the policy's first turn"
            raise EnvironmentFailed(f"{problem}: {how['error'] or how['stop']}")
        self._check_tools(opened["tools"])
        self.chat = read_messages(opened["messages"])
        return Step(history=self.chat)

    async def step(self, turn: Turn) -> Step:
        """Gives the environment the policy's turn; its next request is the answer."""
        message = await self._send(turn, "tool_calls" if turn.reply.calls else "stop")
        if self.ended is not None:
            stop = StopReason.TOOL_FAILED if self.ended["error"] else StopReason.STEP_DONE
            return Step(stop=stop, reason=self.ended["error"], source=self.settings.environment)
        added = new_messages(self.known, message, self.chat)
        source = self.settings.environment
        if added is None:
            return Step(history=self.chat, source=source)
        author = Author.TOOL if added[0]["role"] == "tool" else Author.FEEDBACK
        return Step(author, added, source=source)

    def check_finished(self, turn: Turn) -> bool:
        """Always False: the environment ends the rollout in `step`."""
        return False

    async def finish(self, turn: Turn | None, stop: StopReason) -> RolloutEnd:
        """Gives the environment a last turn that was cut off, and tells it that there are no more."""
        if self.ended is None and turn is not None:
            truncated = stop in (StopReason.LENGTH_TURN, StopReason.LENGTH_ROLLOUT)
            await self._send(turn, "length" if truncated else "stop")
        self.ended = (await self._call(END_CALL))["ended"]
        if self.ended["error"]:
            raise EnvironmentFailed(f"{self.settings.name}: {self.ended['error']}")
        return RolloutEnd({INFO: {"host": host_key(self.settings), **self.place, "stop": self.ended["stop"]}})

    async def _call(self, call: ToolCall) -> dict[str, Any]:
        """What the environment answers. Raises EnvironmentFailed if it broke or took too long."""
        result = await self.start.session.call(call, LOOP)
        if result.outcome is not Outcome.OK:
            raise EnvironmentFailed(result.reason or result.text)
        answer: dict[str, Any] = result.structured
        self.place = {"starts": answer["starts"], "rollout": answer["rollout"]}
        return answer

    async def _send(self, turn: Turn, finish_reason: str) -> Message:
        """Sends a turn; afterwards there is a longer chat, or an end."""
        template, entry = self.start.template, turn.ledger.entries[-1]
        ids = entry.ids[:-1] if template.is_turn_ended(entry.ids) else entry.ids
        text = template.tokenizer.decode(ids)
        message = write_turn(turn.reply, text, inline_reasoning=self.settings.reasoning == "inline")
        finish_reason = "stop" if finish_reason == "tool_calls" and "tool_calls" not in message else finish_reason
        prompt = len(turn.ledger) - len(entry.ids)
        usage = {"prompt_tokens": prompt, "completion_tokens": len(entry.ids), "total_tokens": len(turn.ledger)}
        reply = {"message": message, "finish_reason": finish_reason, "usage": usage}
        answer = await self._call(turn_call(reply, turn.number))
        self.known = self.chat
        if "ended" in answer:
            self.ended = answer["ended"]
        else:
            self.chat = read_messages(answer["messages"])
        return message

    def _check_tools(self, tools: Any) -> None:
        """The policy is shown the same tools in all rollouts."""
        offered = {spec.name for spec in read_tools(tools, self.settings.name)}
        shown = {spec.name for spec in self.start.specs if spec.audience == "policy"}
        if offered != shown:
            names = f"{', '.join(sorted(offered)) or 'none'} instead of {', '.join(sorted(shown)) or 'none'}"
            remedy = "make rows with other tools an environment of their own"
            raise EnvironmentFailed(f"{self.settings.name} offers other tools in this row: {names}\n  remedy: {remedy}")
