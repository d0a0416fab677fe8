"""A policy that says what it was told to, so that everything around it can be tested without a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Self

import anyio
import anyio.lowlevel

from gateway.types import Image
from trainer.engine.base import Agreement, Capabilities, EngineError, Sampling, Written

if TYPE_CHECKING:
    import torch

Answer = Sequence[int] | Written | EngineError
Script = Callable[[Sequence[int], Sampling, str], Answer]
LOGPROB = -0.5
"""Of each id, where the script says none."""


@dataclass(frozen=True, slots=True)
class Asked:
    """One request, as it came."""

    ids: tuple[int, ...]
    sampling: Sampling
    key: str
    group: str
    images: tuple[Image, ...]


class ScriptedEngine:
    """Answers by a function of ids, sampling and key, or from a list of answers for each key.

    An answer is ids, which are cut as sampling says; or what was written, given as it is; or an error, which is raised.
    """

    def __init__(self, script: Script | Mapping[str, Sequence[Answer]], *, context: int = 2**20) -> None:
        self._script = script if callable(script) else _Lists(script)
        self._context = context
        self._version = 0
        self._going = anyio.Event()
        self._going.set()
        self._held: dict[str, anyio.Event] = {}
        self._turns: list[tuple[str, anyio.CancelScope]] = []
        self._known: dict[str, tuple[int, ...]] = {}
        self.asked: list[Asked] = []
        """Every request, in order."""
        self.cancelled = 0
        """Requests that were cancelled before they were answered."""
        self.most = 0
        """The most that were ever on their way at once."""

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities("scripted", exact=False, images=True, context=self._context)

    @property
    def version(self) -> int:
        return self._version

    @property
    def writing(self) -> int:
        """How many requests are on their way."""
        return len(self._turns)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.abort()

    def hold(self, key: str = "") -> anyio.Event:
        """From now on answers for this key, or for all, wait until the event is set."""
        self._held[key] = anyio.Event()
        return self._held[key]

    async def generate(
        self, ids: Sequence[int], sampling: Sampling, *, key: str = "", group: str = "", images: Sequence[Image] = ()
    ) -> Written:
        self.asked.append(Asked(tuple(ids), sampling, key, group, tuple(images)))
        if len(ids) >= self._context:
            raise EngineError(f"{len(ids)} ids leave no room in the context of {self._context}")
        turn = (key, anyio.CancelScope())
        self._turns.append(turn)
        self.most = max(self.most, len(self._turns))
        try:
            with turn[1]:
                await self._wait(key)
        except anyio.get_cancelled_exc_class():
            self.cancelled += 1
            raise
        finally:
            self._turns.remove(turn)
        if turn[1].cancelled_caught:
            return Written((), (), "abort", self._version)
        return self._say(tuple(ids), sampling, key, group)

    @property
    def counted(self) -> Mapping[str, float]:
        return {}

    @property
    def agreement(self) -> Agreement | None:
        return None

    async def publish(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        self._version = version
        self._known.clear()

    async def lend(self) -> bool:
        return False

    async def pause(self) -> None:
        self._going = anyio.Event()

    async def resume(self) -> None:
        self._going.set()

    async def abort(self, key: str = "") -> None:
        for name, scope in self._turns:
            if not key or name == key:
                scope.cancel()

    async def _wait(self, key: str) -> None:
        await anyio.lowlevel.checkpoint()
        for name in {key, ""} & self._held.keys():
            await self._held[name].wait()
        while not self._going.is_set():
            await self._going.wait()

    def _say(self, ids: tuple[int, ...], sampling: Sampling, key: str, group: str) -> Written:
        answer = self._script(ids, sampling, key)
        if isinstance(answer, EngineError):
            raise answer
        if isinstance(answer, Written):
            return answer
        cached = max(_common(self._known.get(name, ()), ids) for name in (f"key {key}", f"group {group}"))
        room = min(sampling.max_tokens, self._context - len(ids))
        written, stopped = _cut(tuple(answer), sampling, room)
        self._known[f"key {key}"] = self._known[f"group {group}"] = ids + written
        logprobs = (LOGPROB,) * len(written)
        return Written(written, logprobs, "stop" if stopped else "length", self._version, min(cached, len(ids) - 1))


def _cut(ids: tuple[int, ...], sampling: Sampling, room: int) -> tuple[tuple[int, ...], bool]:
    """As far as an engine would have written, and whether it stopped by itself: at a stop id, or with the script."""
    ends = [at + 1 for at, token in enumerate(ids) if token in sampling.stop_ids]
    end = min(ends, default=len(ids))
    return ids[: min(end, room)], end <= room


def _common(left: Sequence[int], right: Sequence[int]) -> int:
    return next((at for at, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))


class _Lists:
    """Each key has its answers, one after the other."""

    def __init__(self, answers: Mapping[str, Sequence[Answer]]) -> None:
        self._answers = {key: iter(some) for key, some in answers.items()}

    def __call__(self, ids: Sequence[int], sampling: Sampling, key: str) -> Answer:
        if key not in self._answers:
            return EngineError(f"the script says nothing for {key!r}")
        return next(self._answers[key], EngineError(f"the script has no more for {key!r}"))
