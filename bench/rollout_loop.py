"""The rollout loop as benchmarks run it: real engine, template and gateway, and one tool call after every turn."""

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
from tests.trainer.conversations import make_template
from tests.trainer.policy_scripts import HERMES, encode_turns, make_gateway, render_calls
from trainer.engine.base import Agreement, Capabilities, Engine, Generation, OnIds, Sampling
from trainer.engine.scripted import DEFAULT_LOGPROB, ScriptedEngine
from trainer.rollout.admission import Admission
from trainer.rollout.loop import RolloutRunner
from trainer.rollout.rollout import Rollout
from trainer.rollout.scheduler import Scheduler
from trainer.rollout.settings import ConcurrencySettings, RolloutLimits
from trainer.rollout.steppers import Step, Stepper, ToolsAndFeedback, Turn
from trainer.rollout.task import Task
from trainer.template import Settings, Template
from trainer.view.counters import CounterSnapshot, RolloutCounters

TURNS = 4
SIBLINGS = 8
TURN_TOKENS = 10, 50
"""Least and most tokens of a turn."""


class FixedLengthEngine:
    """An engine whose turns have planned lengths; a random model would end them anywhere."""

    def __init__(self, inner: Engine) -> None:
        self.inner = inner
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
    def counters(self) -> Mapping[str, float]:
        return self.inner.counters

    @property
    def published_bytes(self) -> int:
        return 0

    @property
    def agreement(self) -> Agreement | None:
        return self.inner.agreement

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
        self._turns[key] += 1
        length = random.Random(f"{key}/{self._turns[key]}").randint(*TURN_TOKENS)
        exact = replace(sampling, max_tokens=length, stop_ids=())
        generation = await self.inner.generate(ids, exact, key=key, group=group, images=images, on_ids=on_ids)
        return replace(generation, finish_reason="stop")


class AlwaysCalls(ToolsAndFeedback):
    """A stepper that calls the tool once after every turn, whatever the model generated."""

    CALL = ToolCall("call00000", "work", "{}")

    def check_finished(self, turn: Turn) -> bool:
        return False

    async def step(self, turn: Turn) -> Step:
        return await self._call_tools(replace(turn, reply=replace(turn.reply, calls=(self.CALL,), problems=())))


@dataclass
class LoopRun:
    """What one run of the loop came to."""

    wall_s: float
    cpu_s: float
    counters: CounterSnapshot
    full: CounterSnapshot
    """When the last group started: until then, as many rollouts were under way as allowed."""
    rollouts: list[Rollout] = field(default_factory=list)

    @property
    def tokens_per_s(self) -> float:
        return self.counters.written / self.wall_s

    @property
    def full_tokens_per_s(self) -> float:
        return self.full.written / self.full.elapsed_s


async def run_loop(engine: Engine, count: int, tool_s: float, *, in_flight: int, generating: int = 64) -> LoopRun:
    """Runs `count` rollouts in groups of siblings."""

    async def work() -> str:
        """Works for a while."""
        await anyio.sleep(tool_s)
        return "It is done; go on."

    template = make_template(
        HERMES, Settings(sanity="disable")
    )  # A random model never generates what a template renders.
    limits = RolloutLimits(assistant_turns=TURNS, rollout_tokens=8000)
    admission = ConcurrencySettings(inflight_rollouts=in_flight, running_requests=generating)
    return await _run(FixedLengthEngine(engine), template, work, count, admission, limits=limits, stepper=AlwaysCalls())


async def measure_overhead(count: int, turns: int) -> LoopRun:
    """The loop alone: engine and tool answer at once."""

    async def work(text: str) -> str:
        """Works."""
        return text

    template = make_template(HERMES)
    (turn,) = encode_turns(template, "Some thoughts on it.\n" + render_calls(("work", {"text": "It is done; go on."})))
    generation = Generation(turn, (DEFAULT_LOGPROB,) * len(turn), "stop")
    engine = ScriptedEngine(lambda ids, sampling, key: generation)
    limits = RolloutLimits(assistant_turns=turns, tool_calls=turns, rollout_tokens=10**6)
    admission = ConcurrencySettings(inflight_rollouts=256, running_requests=64)
    return await _run(engine, template, work, count, admission, limits=limits, stepper=ToolsAndFeedback())


def _task(number: int) -> Task:
    return Task(f"t{number}", ({"role": "user", "content": f"What is {number} + 4?"},))


async def _run(  # noqa: PLR0913
    engine: Any,
    template: Template,
    tool: Any,
    count: int,
    admission: ConcurrencySettings,
    *,
    limits: RolloutLimits,
    stepper: Stepper,
) -> LoopRun:
    rollouts: list[Rollout] = []
    full: list[CounterSnapshot] = []

    def tasks() -> Iterator[Task]:
        yield from (_task(number) for number in range(max(1, count // SIBLINGS)))
        full.append(counters.snapshot())

    async with make_gateway(tool, at_once=4096) as gateway, engine:
        counters = RolloutCounters()
        runner = RolloutRunner(engine, template, gateway, limits, stepper=stepper, observer=counters)
        scheduler = Scheduler(runner, min(count, SIBLINGS), admission=Admission(admission))
        wall, cpu = time.perf_counter(), time.process_time()
        async with scheduler.submit(tasks()) as groups:
            async for group in groups:
                rollouts += group.rollouts
        wall_s, cpu_s = time.perf_counter() - wall, time.process_time() - cpu
        return LoopRun(wall_s, cpu_s, counters.snapshot(), full[0], rollouts)
