"""Interactions as their users write them, for the tests."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from typing import Any
from uuid import uuid4

import anyio

from gateway.feedback.base import BaseInteraction
from gateway.feedback.score import compute_score
from gateway.types import ToolCall


class Recorder(BaseInteraction):
    """Writes down what happens to it; each method does what its configuration says."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        self.log: list[tuple[str, str]] = []
        self.seen: list[dict[str, Any]] = []
        self.entered = anyio.Event()
        self.closed = 0

    async def _do(self, method: str) -> None:
        doing = self.config.get(method)
        if isinstance(doing, Exception):
            raise doing
        if doing == "hang":
            self.entered.set()
            await anyio.sleep_forever()

    async def start_interaction(self, instance_id: str | None = None, **kwargs: Any) -> str:
        self.log.append(("start", str(instance_id)))
        self.seen.append(kwargs)
        await self._do("start")
        return self.config.get("id") or str(instance_id)

    async def generate_response(self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any) -> Any:
        self.log.append(("turn", instance_id))
        self.seen.append(kwargs)
        await self._do("turn")
        return self.config.get("returns", (False, "Go on.", 0.5, {"turns": len(self.log)}))

    async def calculate_score(self, instance_id: str, **kwargs: Any) -> float:
        return 0.25

    async def finalize_interaction(self, instance_id: str, **kwargs: Any) -> None:
        self.log.append(("finalize", instance_id))
        await self._do("finalize")

    async def aclose(self) -> None:
        self.closed += 1
        await self._do("aclose")

    def count(self, what: str) -> int:
        return sum(1 for did, _ in self.log if did == what)


class OlderInteraction(BaseInteraction):
    """As the older page of verl's documentation shows one: the policy is the last *user*, and its class has no name."""

    def __init__(self, config: dict) -> None:  # type: ignore[type-arg]
        super().__init__(config)
        self._instance_dict: dict[str, dict[str, Any]] = {}

    async def start_interaction(self, instance_id=None, ground_truth=None, **kwargs):  # type: ignore[no-untyped-def]
        if instance_id is None:
            instance_id = str(uuid4())
        self._instance_dict[instance_id] = {"response": "", "ground_truth": ground_truth, "reward": 0.0}
        return instance_id

    async def generate_response(self, instance_id, messages, **kwargs):  # type: ignore[no-untyped-def]
        content = next((item.get("content", "") for item in reversed(messages) if item.get("role") == "user"), "")
        marked = content if content.startswith("#### ") else "#### " + content
        self._instance_dict[instance_id]["response"] = marked
        if await self.calculate_score(instance_id) == 1.0:
            return True, "Your response is correct!", 1.0, {}
        return False, "Your response is incorrect! You need to reflect on your answer and try again.", 0.0, {}

    async def calculate_score(self, instance_id, **kwargs):  # type: ignore[no-untyped-def]
        kept = self._instance_dict[instance_id]
        return compute_score(kept["response"], kept["ground_truth"], method="flexible", format_score=0.0, score=1.0)

    async def finalize_interaction(self, instance_id, **kwargs):  # type: ignore[no-untyped-def]
        del self._instance_dict[instance_id]


class PlainInteraction(BaseInteraction):
    """None of its methods is async."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        self.threads: set[int] = set()

    def start_interaction(self, instance_id: str | None = None, **kwargs: Any) -> str:  # type: ignore[override]
        self.threads.add(threading.get_ident())
        return str(instance_id)

    def generate_response(self, instance_id: str, messages: list[dict[str, Any]]) -> Any:  # type: ignore[override]
        self.threads.add(threading.get_ident())
        return True, f"{len(messages)} messages", 1

    def finalize_interaction(self, instance_id: str, **kwargs: Any) -> None:  # type: ignore[override]
        self.threads.add(threading.get_ident())


def answers(*texts: str) -> list[dict[str, Any]]:
    """A chat in which the policy said these, one after another."""
    question = {"role": "user", "content": "What is 40 + 2?"}
    return [question, *({"role": "assistant", "content": text} for text in texts)]


def asking(name: str, messages: Sequence[dict[str, Any]]) -> ToolCall:
    return ToolCall("c1", f"feedback_{name}", json.dumps({"messages": messages}))
