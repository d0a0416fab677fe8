"""A scripted engine: returns prepared answers, so that everything around a model can be tested without one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import anyio
import anyio.lowlevel

from gateway.types import Image
from trainer.engine.base import Capabilities, Engine, EngineError, Generation, OnIds, Sampling
from trainer.ledger import common_length

if TYPE_CHECKING:
    import torch

Answer = Sequence[int] | Generation | EngineError
Script = Callable[[Sequence[int], Sampling, str], Answer]
DEFAULT_LOGPROB = -0.5
"""The logprob of ids whose answer gives none."""


@dataclass(frozen=True, slots=True)
class RecordedRequest:
    """The arguments of one call of `generate`."""

    ids: tuple[int, ...]
    sampling: Sampling
    key: str
    group: str
    images: tuple[Image, ...]


class ScriptedEngine(Engine):
    """Answers by a function of ids, sampling and key, or from a list of answers for each key.

    An answer is a list of ids, truncated as `sampling` asks; a `Generation`, returned as it is; or an error, raised.
    """

    def __init__(self, script: Script | Mapping[str, Sequence[Answer]], *, context_length: int = 2**20) -> None:
        self._script = script if callable(script) else _AnswerLists(script)
        self._context_length = context_length
        self._version = 0
        self._holds: dict[str, anyio.Event] = {}
        self.in_flight = 0
        """The number of requests under way."""
        self._cache: dict[str, tuple[int, ...]] = {}
        self.requests: list[RecordedRequest] = []
        """Every request, in order."""
        self.cancelled = 0
        """The number of requests that were cancelled before they were answered."""
        self.max_concurrent = 0
        """The most requests that were ever under way at once."""

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities("scripted", is_exact=False, supports_images=True, context_length=self._context_length)

    @property
    def version(self) -> int:
        return self._version

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    def hold(self, key: str = "") -> anyio.Event:
        """Makes answers for this key, or for all, wait until the returned event is set."""
        self._holds[key] = anyio.Event()
        return self._holds[key]

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
        self.requests.append(RecordedRequest(tuple(ids), sampling, key, group, tuple(images)))
        if len(ids) >= self._context_length:
            raise EngineError(f"{len(ids)} ids leave no room in the context of {self._context_length}")
        self.in_flight += 1
        self.max_concurrent = max(self.max_concurrent, self.in_flight)
        try:
            await anyio.lowlevel.checkpoint()
            for held_key in {key, ""} & self._holds.keys():
                await self._holds[held_key].wait()
        except anyio.get_cancelled_exc_class():
            self.cancelled += 1
            raise
        finally:
            self.in_flight -= 1
        generation = self._answer(tuple(ids), sampling, key, group)
        for token in generation.ids if on_ids else ():
            on_ids((token,))  # type: ignore[misc]
            await anyio.lowlevel.checkpoint()
        return generation

    async def publish(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        self._version = version
        self._cache.clear()

    def _answer(self, ids: tuple[int, ...], sampling: Sampling, key: str, group: str) -> Generation:
        answer = self._script(ids, sampling, key)
        if isinstance(answer, EngineError):
            raise answer
        if isinstance(answer, Generation):
            return answer
        names = (f"key {key}", f"group {group}")
        cached = max(common_length(self._cache.get(name, ()), ids) for name in names)
        limit = min(sampling.max_tokens, self._context_length - len(ids))
        sampled, stopped = _truncate(tuple(answer), sampling, limit)
        for name in names:
            self._cache[name] = ids + sampled
        logprobs = (DEFAULT_LOGPROB,) * len(sampled)
        return Generation(sampled, logprobs, "stop" if stopped else "length", self._version, min(cached, len(ids) - 1))


def _truncate(ids: tuple[int, ...], sampling: Sampling, limit: int) -> tuple[tuple[int, ...], bool]:
    """The ids up to the first stop id or the limit, and whether they ended before the limit did."""
    ends = [index + 1 for index, token in enumerate(ids) if token in sampling.stop_ids]
    end = min(ends, default=len(ids))
    return ids[: min(end, limit)], end <= limit


class _AnswerLists:
    """A script that gives each key its answers one after the other."""

    def __init__(self, answers: Mapping[str, Sequence[Answer]]) -> None:
        self._answers = {key: iter(key_answers) for key, key_answers in answers.items()}

    def __call__(self, ids: Sequence[int], sampling: Sampling, key: str) -> Answer:
        if key not in self._answers:
            return EngineError(f"the script has no answers for {key!r}")
        return next(self._answers[key], EngineError(f"the script has no more answers for {key!r}"))
