"""Interactions of users, for tests."""

from __future__ import annotations

import threading
from typing import Any

import anyio

from gateway.feedback.base import BaseInteraction


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
