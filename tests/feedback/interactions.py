"""Interactions of users, for tests."""

from __future__ import annotations

import threading
from typing import Any
from uuid import uuid4

import anyio

from gateway.feedback.base import BaseInteraction
from gateway.feedback.gsm8k import compute_score


class Recorder(BaseInteraction):
    """Records its calls; the configuration makes a method raise or hang."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        self.log: list[tuple[str, str]] = []
        self.received_kwargs: list[dict[str, Any]] = []
        self.entered = anyio.Event()
        self.closed = 0

    async def _behave(self, method: str) -> None:
        behaviour = self.config.get(method)
        if isinstance(behaviour, Exception):
            raise behaviour
        if behaviour == "hang":
            self.entered.set()
            await anyio.sleep_forever()

    async def start_interaction(self, instance_id: str | None = None, **kwargs: Any) -> str:
        self.log.append(("start", str(instance_id)))
        self.received_kwargs.append(kwargs)
        await self._behave("start")
        return self.config.get("id") or str(instance_id)

    async def generate_response(self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any) -> Any:
        self.log.append(("turn", instance_id))
        self.received_kwargs.append(kwargs)
        await self._behave("turn")
        return self.config.get("returns", (False, "Go on.", 0.5, {"turns": len(self.log)}))

    async def calculate_score(self, instance_id: str, **kwargs: Any) -> float:
        return 0.25

    async def finalize_interaction(self, instance_id: str, **kwargs: Any) -> None:
        self.log.append(("finalize", instance_id))
        await self._behave("finalize")

    async def aclose(self) -> None:
        self.closed += 1
        await self._behave("aclose")

    def count(self, method: str) -> int:
        return sum(name == method for name, _ in self.log)


class OlderInteraction(BaseInteraction):
    """The example of verl's older documentation: it reads the last *user* message, and takes no name."""

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
        answer = content if content.startswith("#### ") else "#### " + content
        self._instance_dict[instance_id]["response"] = answer
        if await self.calculate_score(instance_id) == 1.0:
            return True, "Your response is correct!", 1.0, {}
        return False, "Your response is incorrect! You need to reflect on your answer and try again.", 0.0, {}

    async def calculate_score(self, instance_id, **kwargs):  # type: ignore[no-untyped-def]
        instance = self._instance_dict[instance_id]
        return compute_score(
            instance["response"], instance["ground_truth"], method="flexible", format_score=0.0, score=1.0
        )

    async def finalize_interaction(self, instance_id, **kwargs):  # type: ignore[no-untyped-def]
        del self._instance_dict[instance_id]


class PlainInteraction(BaseInteraction):
    """An interaction without async methods."""

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


def make_chat(*texts: str) -> list[dict[str, Any]]:
    """A chat with a question and these answers of the policy."""
    question = {"role": "user", "content": "What is 40 + 2?"}
    return [question, *({"role": "assistant", "content": text} for text in texts)]
