"""The training process's engine as a worker's rollouts see it: each request is sent there, and its answer awaited."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import count
from typing import TYPE_CHECKING, Any, Self

import anyio

from gateway.types import Image
from mtrl_plugins.workers.line_channel import LineChannel
from mtrl_plugins.workers.messages import Blobs, generation_from_plain, request_to_plain
from trainer.engine.base import Agreement, Capabilities, EngineError, Generation, OnIds, Sampling
from trainer.rollout.observer import RolloutObserver
from trainer.rollout.rollout import Rollout
from trainer.rollout.steppers import CALLS_INFO, Step

if TYPE_CHECKING:
    import torch

TRAINER_STATES = frozenset({"pending", "generating"})
"""States of a rollout that the training process sees itself."""

CALL_FIELDS = ("name", "outcome", "elapsed_s")
"""What the progress display needs of a tool call."""


class EventBuffer:
    """What rollouts of this process did, for the training process's progress display; sent a few times a second."""

    def __init__(self) -> None:
        self._events: list[list[Any]] = []

    def add(self, *event: Any) -> None:
        self._events.append([*event])

    def send_to(self, channel: LineChannel) -> None:
        """Sends what has gathered."""
        if self._events:
            channel.send({"t": "events", "e": self._events})
            self._events = []


class _Request:
    """A request under way."""

    def __init__(self) -> None:
        self.done = anyio.Event()
        self.answer: Mapping[str, Any] = {}


class RemoteEngine:
    """The engine of one rollout. Weights are the training process's own."""

    def __init__(
        self, channel: LineChannel, rollout: int, blobs: Blobs, capabilities: Capabilities, events: EventBuffer
    ) -> None:
        self.capabilities = capabilities
        self.version = 0
        """The version of the weights that answered last."""
        self.queued_s: defaultdict[str, list[float]] = defaultdict(list)
        """How long each request waited for a slot of the engine, by its key: first the rollout's, then sub-agents'."""
        self._channel, self._rollout, self._blobs, self._events = channel, rollout, blobs, events
        self._numbers = count()
        self._requests: dict[int, _Request] = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: Any) -> None:
        pass

    @property
    def counters(self) -> Mapping[str, float]:
        return {}

    @property
    def published_bytes(self) -> int:
        return 0

    @property
    def agreement(self) -> Agreement | None:
        return None

    async def generate(
        self,
        ids: Sequence[int],
        sampling: Sampling,
        *,
        key: str = "",
        group: str = "",
        images: Sequence[Image] = (),
        on_ids: OnIds | None = None,
    ) -> Generation:
        """Asks the training process, which knows key and group; `on_ids` gets everything at the end."""
        answer = await self._ask(request_to_plain(ids, sampling, images, self._blobs))
        generation = generation_from_plain(answer)
        self.version = generation.version
        self.queued_s[key].append(answer["queued"])
        if on_ids is not None and generation.ids:
            on_ids(generation.ids)
        return generation

    async def _ask(self, content: Mapping[str, Any]) -> Mapping[str, Any]:
        """The training process's answer. Raises EngineError or RuntimeError, as it says."""
        number, request = next(self._numbers), _Request()
        self._requests[number] = request
        self._events.send_to(self._channel)  # Before the request, so that the rollout's states come in order.
        self._channel.send({"t": "generate", "r": self._rollout, "g": number, **content})
        try:
            await request.done.wait()  # The rollout's own limit bounds it, and the end of the connection.
        except anyio.get_cancelled_exc_class():
            self._channel.send({"t": "stop", "r": self._rollout, "g": number})
            raise
        finally:
            del self._requests[number]
        answer = request.answer
        if "error" in answer:
            raise (EngineError if answer["engine"] else RuntimeError)(answer["error"])
        return answer

    def receive(self, message: Mapping[str, Any]) -> None:
        """Takes an answer of the training process."""
        request = self._requests.get(message["g"])
        if request is not None:
            request.answer = message
            request.done.set()

    async def publish(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        raise NotImplementedError("weights are published by the training process")

    async def release_memory(self) -> bool:
        return False


class EventObserver(RolloutObserver):
    """Puts one rollout's events into the buffer."""

    def __init__(self, buffer: EventBuffer, rollout: int) -> None:
        self._buffer, self._rollout = buffer, rollout

    def on_state(self, key: str, state: str) -> None:
        if state not in TRAINER_STATES:
            self._buffer.add(self._rollout, "state", state)

    def on_generation(self, key: str, generation: Generation, prompt_tokens: int) -> None:
        self._buffer.add(self._rollout, "generation", prompt_tokens)

    def on_step(self, key: str, step: Step, seconds: float) -> None:
        calls = [{name: call[name] for name in CALL_FIELDS} for call in step.info.get(CALLS_INFO, ())]
        self._buffer.add(self._rollout, "step", step.author, [*step.outcomes], step.source, calls, seconds)

    def on_end(self, key: str, rollout: Rollout) -> None:
        """Nothing: the rollout itself is sent."""
