"""The stepper for environments in host processes: each turn of the policy is the answer of the environment's model.

The environment's own runner calls its tools, answers the policy and decides when a rollout is over.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from trainer.environments.environment_messages import new_messages, read_messages, read_tools, write_turn
from trainer.environments.host_process import EnvironmentFailed, EnvironmentHost, host_key
from trainer.ledger import Author, Message
from trainer.rollout.rollout import StopReason
from trainer.rollout.steppers import RolloutEnd, RolloutStart, Step, Turn

ROW_COLUMN = "environment_row"
"""The column that says which row of the environment a task is."""
INFO = "environment"
"""The key of a rollout's infos by which the reward finds it in the host."""


class EnvironmentStepper:
    """Begins a rollout of the environment for each of ours."""

    def __init__(self, host: EnvironmentHost, *, inline_reasoning: bool) -> None:
        self.host, self.inline_reasoning = host, inline_reasoning

    @asynccontextmanager
    async def begin(self, start: RolloutStart) -> AsyncIterator[tuple[Step, EnvironmentRollout]]:
        """Opens the environment's rollout; one that is not to be scored is closed."""
        rollout = EnvironmentRollout(self.host, start, inline_reasoning=self.inline_reasoning)
        try:
            yield await rollout.open(), rollout
        finally:
            rollout.close()

    def check_finished(self, turn: Turn) -> bool:
        return False

    def step(self, turn: Turn) -> Step:
        raise NotImplementedError("call `begin` for each rollout")


class EnvironmentRollout:
    """One rollout, here and in the environment."""

    def __init__(self, host: EnvironmentHost, start: RolloutStart, *, inline_reasoning: bool) -> None:
        self.host, self.start, self.inline_reasoning = host, start, inline_reasoning
        self.name: str | None = None
        self.chat: tuple[Message, ...] = ()
        """The chat that the environment knows."""
        self.ended: dict[str, Any] | None = None
        """How the environment's rollout ended."""
        self.is_kept = False
        """The environment keeps it until it is scored."""

    async def open(self) -> Step:
        """The environment's first request to its model."""
        row = self.start.task.columns.get(ROW_COLUMN)
        if not isinstance(row, dict):
            framework = self.host.settings.framework
            problem = f"{self.start.task.location}: is not a row of {self.host.name}"
            raise EnvironmentFailed(f"{problem}\n  remedy: write `data: {framework}`")
        opened = await self.host.request_async("open", **row)
        self.name, self.starts = opened["rollout"], self.host.starts
        if "ended" in opened:
            how = opened["ended"]
            problem = f"{self.host.name} ended a rollout before the policy's first turn"
            raise EnvironmentFailed(f"{problem}: {how['error'] or how['stop']}")
        self._check_tools(opened["tools"])
        self.chat = read_messages(opened["messages"])
        return Step(history=self.chat)

    async def step(self, turn: Turn) -> Step:
        """Gives the environment the policy's turn; its next request is the answer."""
        message = await self._send(turn, "tool_calls" if turn.reply.calls else "stop")
        if self.ended is not None:
            stop = StopReason.TOOL_FAILED if self.ended["error"] else StopReason.STEP_DONE
            return Step(stop=stop, reason=self.ended["error"], source=self.host.settings.environment)
        added = new_messages(self.known, message, self.chat)
        source = self.host.settings.environment
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
        if self.ended is None:
            self.ended = (await self.host.request_async("end", rollout=self.name))["ended"]
        if self.ended["error"]:
            raise EnvironmentFailed(f"{self.host.name}: {self.ended['error']}")
        self.is_kept = True
        place = {"host": host_key(self.host.settings), "starts": self.starts, "rollout": self.name}
        return RolloutEnd({INFO: {**place, "stop": self.ended["stop"]}})

    def close(self) -> None:
        """Lets the environment forget the rollout, unless it is to be scored."""
        if self.name is not None and not self.is_kept:
            self.host.tell("close", rollout=self.name)

    async def _send(self, turn: Turn, finish_reason: str) -> Message:
        """Sends a turn; afterwards there is a longer chat, or an end."""
        template, entry = self.start.template, turn.ledger.entries[-1]
        ids = entry.ids[:-1] if template.is_turn_ended(entry.ids) else entry.ids
        text = template.tokenizer.decode(ids)
        message = write_turn(turn.reply, text, inline_reasoning=self.inline_reasoning)
        finish_reason = "stop" if finish_reason == "tool_calls" and "tool_calls" not in message else finish_reason
        prompt = len(turn.ledger) - len(entry.ids)
        usage = {"prompt_tokens": prompt, "completion_tokens": len(entry.ids), "total_tokens": len(turn.ledger)}
        reply = {"message": message, "finish_reason": finish_reason, "usage": usage}
        answer = await self.host.request_async("turn", rollout=self.name, reply=reply)
        self.known = self.chat
        if "ended" in answer:
            self.ended = answer["ended"]
        else:
            self.chat = read_messages(answer["messages"])
        return message

    def _check_tools(self, tools: Any) -> None:
        """The policy is shown the same tools in all rollouts."""
        offered = {spec.name for spec in read_tools(tools, self.host.name)}
        shown = {spec.name for spec in self.start.specs}
        if offered != shown:
            names = f"{', '.join(sorted(offered)) or 'none'} instead of {', '.join(sorted(shown)) or 'none'}"
            remedy = "make rows with other tools an environment of their own"
            raise EnvironmentFailed(f"{self.host.name} offers other tools in this row: {names}\n  remedy: {remedy}")
