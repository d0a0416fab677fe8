"""The training process's engine as a worker's rollouts see it: each request is sent there, and its answer awaited."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any, Self

import anyio

from gateway.types import Image
from mtrl_plugins.workers.line_channel import LineChannel
from mtrl_plugins.workers.messages import Blobs, generation_from_plain, request_to_plain, sampling_to_plain
from trainer.engine.base import Agreement, Capabilities, EngineError, Generation, OnIds, Sampling
from trainer.engine.sglang.direct_requests import INDIRECT_S, DirectClient, NotReachedError
from trainer.engine.sglang.request import generate_without_banned
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

    def __init__(self, ids: Sequence[int] = ()) -> None:
        self.done = anyio.Event()
        self.answer: Mapping[str, Any] = {}
        self.ids = ids
        self.generation: Generation | None = None
        """What a server answered to this worker."""
        self.sending: dict[int, anyio.CancelScope] = {}


class Direct:
    """How the rollouts of this process reach the engine's servers: themselves, but for a time after one could not be
    reached."""

    def __init__(self, client: DirectClient, start: Callable[..., object]) -> None:
        """`start` runs an async function beside the caller."""
        self.client, self.start = client, start
        self._indirect_until = 0.0

    @property
    def is_used(self) -> bool:
        return time.monotonic() >= self._indirect_until

    def leave_to_trainer(self) -> None:
        self._indirect_until = time.monotonic() + INDIRECT_S


class RemoteEngine:
    """The engine of one rollout. Weights, pauses and aborts are the training process's own."""

    def __init__(
        self, channel: LineChannel, rollout: int, blobs: Blobs, capabilities: Capabilities, events: EventBuffer
    ) -> None:
        self.capabilities = capabilities
        self.version = 0
        """The version of the weights that answered last."""
        self.queued_s: list[float] = []
        """How long each request waited for a slot of the engine."""
        self._channel, self._rollout, self._blobs, self._events = channel, rollout, blobs, events
        self._numbers = count()
        self._requests: dict[int, _Request] = {}
        self.direct: Direct | None = None
        """Set where the engine's servers are asked by this process itself."""

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
        generation, queued_s = None, list[float]()
        if self.direct is not None and self.direct.is_used and not images:
            try:
                generation = await generate_without_banned(partial(self._generate_directly, queued_s), ids, sampling)
            except NotReachedError:
                self.direct.leave_to_trainer()
        if generation is None:
            answer = await self._ask(_Request(), request_to_plain(ids, sampling, images, self._blobs), queued_s)
            generation = generation_from_plain(answer)
        self.version = generation.version
        self.queued_s.append(sum(queued_s))
        if on_ids is not None and generation.ids:
            on_ids(generation.ids)
        return generation

    async def _generate_directly(self, queued_s: list[float], ids: Sequence[int], sampling: Sampling) -> Generation:
        """Asks the training process for a server, and that server. Raises NotReachedError if it cannot be reached."""
        request = _Request(ids)
        answer = await self._ask(request, {"direct": len(ids), "sampling": sampling_to_plain(sampling)}, queued_s)
        generation, own = generation_from_plain(answer), request.generation
        if not answer["count"]:
            return generation
        if own is None or len(own.ids) != answer["count"]:
            raise EngineError("a server's answer is not the one that the training process counts")
        return replace(generation, ids=own.ids, logprobs=own.logprobs)

    async def _ask(self, request: _Request, content: Mapping[str, Any], queued_s: list[float]) -> Mapping[str, Any]:
        """The training process's answer. Raises EngineError, RuntimeError or NotReachedError, as it says."""
        number = next(self._numbers)
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
            for scope in request.sending.values():
                scope.cancel()
        answer = request.answer
        if "not reached" in answer:
            raise NotReachedError
        if "error" in answer:
            raise (EngineError if answer["engine"] else RuntimeError)(answer["error"])
        queued_s.append(answer["queued"])
        return answer

    def receive(self, message: Mapping[str, Any]) -> None:
        """Takes an answer of the training process, or what it has this process ask a server."""
        request = self._requests.get(message["g"])
        if request is None:
            return
        if message["t"] == "generated":
            request.answer = message
            request.done.set()
        elif message["t"] == "unsend" and message["n"] in request.sending:
            request.sending[message["n"]].cancel()
        elif message["t"] == "send" and self.direct is not None:
            request.sending[message["n"]] = anyio.CancelScope()
            self.direct.start(self._send_to_server, self.direct.client, request, message)

    async def _send_to_server(self, client: DirectClient, request: _Request, message: Mapping[str, Any]) -> None:
        """Asks a server, and tells the training process of the answer without its tokens."""
        number = message["n"]
        with request.sending[number]:
            reported, request.generation = await client.post(message["url"], message["body"], request.ids)
            self._channel.send({"t": "sent", "r": self._rollout, "g": message["g"], "n": number, **reported})
        request.sending.pop(number, None)

    async def publish(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        raise NotImplementedError("weights are published by the training process")

    async def release_memory(self) -> bool:
        return False

    async def pause(self) -> None:
        raise NotImplementedError("the training process pauses its engine")

    async def resume(self) -> None:
        raise NotImplementedError("the training process resumes its engine")

    async def abort(self, key: str = "") -> None:
        raise NotImplementedError("the training process aborts generations")


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
