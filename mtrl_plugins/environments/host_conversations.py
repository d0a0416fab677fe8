"""Operations of a host process for environments with a runner of their own, whose model is the policy.

A rollout is a conversation: the runner asks its model, which is an endpoint in this process, for one turn after the
other, and the trainer answers. Runs in the host process, so only the standard library is available.
"""

from __future__ import annotations

import asyncio
import json
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from hashlib import sha256
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING or __name__.startswith("mtrl_plugins."):
    from mtrl_plugins.environments.host_server import HostError
else:
    from host_server import HostError

MAX_KEPT = 8192
"""Rollouts that are kept, with their scores, until the trainer closes them."""


class Conversation:
    """One rollout: what the environment asks of its model, and what the policy answers."""

    def __init__(self) -> None:
        self.asked: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.run: asyncio.Task[Any] | None = None
        self.result: Any = None
        """What the environment's runner returned; dropped once it is scored."""
        self.score: dict[str, Any] | None = None
        self.is_over = False
        """The policy writes no more turns."""
        self.problem = ""
        self._reply: asyncio.Future[dict[str, Any] | None] | None = None

    async def ask(self, request: dict[str, Any]) -> dict[str, Any] | None:
        """The policy's next turn, for the endpoint; None if it can write no more."""
        if self._reply is not None:
            self.problem = "the environment asked for two turns at once; a rollout is one chat"
            return None
        if self.is_over:
            return None
        self._reply = asyncio.get_running_loop().create_future()
        self.asked.put_nowait(request)
        try:
            return await self._reply
        finally:
            self._reply = None

    def answer(self, reply: dict[str, Any] | None) -> None:
        """Gives the environment the policy's turn; None if there is none."""
        self.is_over = reply is None
        if self._reply is not None and not self._reply.done():
            self._reply.set_result(reply)


class ConversationHost:
    """One environment and its rollouts."""

    def __init__(self, adapter: Any, endpoint: Any) -> None:
        self.adapter, self.endpoint = adapter, endpoint
        self.conversations: OrderedDict[str, Conversation] = endpoint.conversations
        self.count = 0
        self._scoring = asyncio.Lock()
        self.operations: dict[str, Callable[..., Awaitable[Any]]] = {
            "rows": self.rows,
            "open": self.open,
            "turn": self.turn,
            "end": self.end,
            "score": self.score,
            "close": self.close,
        }

    async def close_all(self) -> None:
        """Cancels all runners."""
        for rollout in [*self.conversations]:
            self.close_one(rollout)

    async def rows(self, split: str, start: int, count: int) -> Any:
        """Some rows of the environment's data, each with a prompt, an answer and a digest of them."""
        rows = await asyncio.to_thread(self.adapter.rows, split, start, count)
        return [{**row, "digest": _digest(row)} for row in rows]

    async def open(self, split: str, row: int, digest: str | None = None) -> Any:
        """Starts a rollout; returns what the environment asks of its model first."""
        if digest is not None and [digest] != [found["digest"] for found in await self.rows(split, row, 1)]:
            raise HostError(f"row {row} is no longer what it was", "let the environment order its rows by a fixed seed")
        self.count += 1
        name, conversation = f"rollout-{self.count}", Conversation()
        self.conversations[name] = conversation
        while len(self.conversations) > MAX_KEPT:
            self.close_one(next(iter(self.conversations)))
        conversation.run = asyncio.create_task(self.adapter.run(split, row, name))
        return {"rollout": name, **await self._next(conversation)}

    async def turn(self, rollout: str, reply: dict[str, Any]) -> Any:
        """Gives the environment a turn of the policy; returns what it asks next, or how it ended."""
        conversation = self._find(rollout)
        conversation.answer(reply)
        return await self._next(conversation)

    async def end(self, rollout: str) -> Any:
        """Tells the environment that the policy can write no more turns; returns how it ended."""
        conversation = self._find(rollout)
        conversation.answer(None)
        while "ended" not in (step := await self._next(conversation)):
            conversation.answer(None)
        return step

    async def score(self, rollouts: list[str]) -> Any:
        """The scores of a group's rollouts, which are computed once and together."""
        async with self._scoring:
            found = [self._find(rollout) for rollout in rollouts]
            todo = [conversation for conversation in found if conversation.score is None]
            if todo:
                scores = await self.adapter.score([conversation.result for conversation in todo])
                for conversation, score in zip(todo, scores, strict=True):
                    conversation.score, conversation.result = score, None
            return [conversation.score for conversation in found]

    async def close(self, rollout: str) -> Any:
        """Ends a rollout and forgets it."""
        self.close_one(rollout)
        return {}

    def close_one(self, rollout: str) -> None:
        """Cancels the environment's runner."""
        conversation = self.conversations.pop(rollout, None)
        if conversation is not None and conversation.run is not None:
            conversation.is_over = True
            conversation.run.cancel()

    def _find(self, rollout: str) -> Conversation:
        if rollout not in self.conversations:
            raise HostError(f"{rollout} is not known here", "it was closed, or the environment's process was restarted")
        return self.conversations[rollout]

    async def _next(self, conversation: Conversation) -> dict[str, Any]:
        """What the environment asks next, or how its runner ended."""
        run = conversation.run
        if run is None:
            raise HostError("the rollout has not started")
        asked = asyncio.ensure_future(conversation.asked.get())
        try:
            await asyncio.wait({asked, run}, return_when=asyncio.FIRST_COMPLETED)
            if conversation.problem:
                raise HostError(conversation.problem, "see what the guide says cannot be had")
            if not run.done():
                return asked.result()
        finally:
            asked.cancel()
        conversation.result = run.result()
        return {"ended": self.adapter.describe(conversation.result)}


def _digest(row: Mapping[str, Any]) -> str:
    return sha256(json.dumps(row, sort_keys=True, default=str).encode()).hexdigest()[:16]
