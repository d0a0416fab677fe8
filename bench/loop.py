"""The whole loop as it is measured: real engine, template and gateway, and a plug-in that always has a tool called."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any, Self

import anyio

from gateway.types import Image, ToolCall
from tests.trainer.conversations import template_for
from tests.trainer.scripts import HERMES, calling, gateway_of, says
from trainer.config import Admission, RolloutLimits
from trainer.engine.base import Agreement, Capabilities, Engine, Sampling, Written
from trainer.engine.scripted import LOGPROB, ScriptedEngine
from trainer.groups import Groups
from trainer.play import Player
from trainer.run.rollout import Rollout
from trainer.steps import Step, Stepper, ToolsAndFeedback, Turn
from trainer.task import Task
from trainer.template import Settings, Template
from trainer.view.counts import Counts, Seen

TURNS = 4
SIBLINGS = 8
LENGTHS = 10, 50
"""Tokens of a turn, from and to."""


class Planned:
    """An engine whose turns are as long as planned: chance would end them where it likes."""

    def __init__(self, inner: Engine) -> None:
        self.inner = inner
        self.inside_s = 0.0
        self._turns: Counter[str] = Counter()

    async def __aenter__(self) -> Self:
        await self.inner.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.inner.__aexit__(kind, error, trace)

    @property
    def capabilities(self) -> Capabilities:
        return self.inner.capabilities

    @property
    def counted(self) -> Mapping[str, float]:
        return self.inner.counted

    @property
    def agreement(self) -> Agreement | None:
        return self.inner.agreement

    async def generate(
        self, ids: Sequence[int], sampling: Sampling, *, key: str = "", group: str = "", images: Sequence[Image] = ()
    ) -> Written:
        self._turns[key] += 1
        length = random.Random(f"{key}/{self._turns[key]}").randint(*LENGTHS)
        exact = replace(sampling, max_tokens=length, stop_ids=())
        written = await self.inner.generate(ids, exact, key=key, group=group, images=images)
        return replace(written, stop="stop")


class AlwaysCalls(ToolsAndFeedback):
    """Whatever chance wrote, the tool is called, and called once."""

    CALL = ToolCall("call00000", "work", "{}")

    def check_finished(self, turn: Turn) -> bool:
        return False

    async def step(self, turn: Turn) -> Step:
        return await self._call(replace(turn, reply=replace(turn.reply, calls=(self.CALL,), problems=())))


@dataclass
class Ran:
    """What one run of the loop came to."""

    wall_s: float
    cpu_s: float
    seen: Seen
    full: Seen
    """When the last group began: until then, as many were in flight as may be."""
    rollouts: list[Rollout] = field(default_factory=list)

    @property
    def per_s(self) -> float:
        return self.seen.written / self.wall_s

    @property
    def full_per_s(self) -> float:
        return self.full.written / self.full.elapsed_s


async def ran(engine: Engine, count: int, tool_s: float, *, in_flight: int, writing: int = 64) -> Ran:
    """`count` rollouts in groups of siblings."""

    async def work() -> str:
        """Works for a while."""
        await anyio.sleep(tool_s)
        return "It is done; go on."

    template = template_for(HERMES, Settings(sanity="disable"))  # Chance never writes as a template would.
    limits = RolloutLimits(assistant_turns=TURNS, rollout_tokens=8000)
    return await _played(
        Planned(engine), template, work, (count, in_flight, writing), limits=limits, stepper=AlwaysCalls()
    )


async def overhead(count: int, turns: int) -> Ran:
    """The loop alone: the policy says at once what it is told to, and the tool answers at once."""

    async def work(text: str) -> str:
        """Works."""
        return text

    template = template_for(HERMES)
    (turn,) = says(template, "Some thoughts on it.\n" + calling(("work", {"text": "It is done; go on."})))
    written = Written(turn, (LOGPROB,) * len(turn), "stop")
    engine = ScriptedEngine(lambda ids, sampling, key: written)
    limits = RolloutLimits(assistant_turns=turns, tool_calls=turns, rollout_tokens=10**6)
    return await _played(engine, template, work, (count, 256, 64), limits=limits, stepper=ToolsAndFeedback())


def _task(number: int) -> Task:
    return Task(f"t{number}", ({"role": "user", "content": f"What is {number} + 4?"},))


async def _played(
    engine: Any, template: Template, tool: Any, room: tuple[int, int, int], *, limits: RolloutLimits, stepper: Stepper
) -> Ran:
    count, in_flight, writing = room
    rollouts: list[Rollout] = []
    full: list[Seen] = []

    def tasks() -> Iterator[Task]:
        yield from (_task(number) for number in range(max(1, count // SIBLINGS)))
        full.append(counts.seen())

    async with gateway_of(tool, at_once=4096) as gateway, engine:
        counts = Counts()
        player = Player(engine, template, gateway, limits, stepper=stepper, watch=counts)
        groups = Groups(player, min(count, SIBLINGS), admission=Admission(open=in_flight, writing=writing))
        wall, cpu = time.perf_counter(), time.process_time()
        async with groups.play(tasks()) as done:
            async for group in done:
                rollouts += group.rollouts
        return Ran(time.perf_counter() - wall, time.process_time() - cpu, counts.seen(), full[0], rollouts)
