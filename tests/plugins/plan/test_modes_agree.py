"""The simulated modes take the same groups at the same times as the trainer's own modes on a virtual clock."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import anyio
import pytest

from mtrl_plugins.plan.simulate import SimulatedGroup, SimulatedRollouts, simulate
from mtrl_plugins.plan.speeds import Cluster, EngineSpeed, TrainerSpeed
from mtrl_plugins.plan.workload import JobLimits, RolloutScript, TurnScript, Workload
from tests.virtual_clock import VIRTUAL_CLOCK
from trainer.data.curriculum import TaskDraw
from trainer.ledger import Author, Entry, Ledger
from trainer.reward.scorer import ScoredGroup, ScoredRollout
from trainer.rollout.rollout import Rollout, StopReason
from trainer.rollout.task import Task
from trainer.train.collect import StepCollector
from trainer.train.modes import make_rollout_source
from trainer.train.settings import TrainSettings

STEPS, PROMPTS, N = 6, 3, 2
TOKEN_S, UPDATE_S = 0.01, 1.7
JOBS: dict[str, dict[str, Any]] = {
    "synchronous": {},
    "synchronous, few open": {"concurrency": {"inflight_rollouts": 2}},
    "synchronous, few slots": {"concurrency": {"running_requests": 2}},
    "one step off": {"mode": "one_step_off"},
    "asynchronous": {"mode": "asynchronous"},
    "asynchronous, stale": {"mode": "asynchronous", "max_staleness": 2, "concurrency": {"inflight_rollouts": 5}},
    "asynchronous, few slots": {"mode": "asynchronous", "max_staleness": 3, "concurrency": {"running_requests": 2}},
}
Step = tuple[float, int, int]
"""When a step took its groups, how many it dropped, and the age of its oldest token."""


def script_of(group: int, index: int) -> RolloutScript:
    """Turns that differ in number and length, some far longer than others, so that no two end at the same moment."""
    seed = 7 * group + 3 * index + 1
    turns = 1 + seed % 4
    long = 400 if group % 5 == 3 else 0
    return tuple(
        TurnScript(
            10 * turn, 20 + (37 * seed + 53 * turn) % 97 + long, (0.2 + 0.0137 * seed) if turn < turns - 1 else 0.0
        )
        for turn in range(turns)
    )


def make_settings(changes: dict[str, Any]) -> TrainSettings:
    return TrainSettings.model_validate(
        {
            "prompts": PROMPTS,
            "n": N,
            "steps": STEPS,
            "evaluation": {"every": 0},
            "algorithm": {"name": "grpo"},
            **changes,
        }
    )


class ScriptedRunner:
    """Plays scripts with sleeps, under the versions of the weights that there are then."""

    def __init__(self) -> None:
        self.version = 0
        self.groups: dict[str, int] = {}

    async def run(self, task: Task, *, group: str, index: int, attempt: int, slot: Any) -> Rollout:
        number = self.groups.setdefault(group, len(self.groups))
        entries = []
        for turn in script_of(number, index):
            async with slot:
                started = self.version
                await anyio.sleep(turn.written * TOKEN_S)
                before = ((started, 1),) if started != self.version else ()
            entries.append(
                Entry(Author.POLICY, (1,) * turn.written, logprobs=(0.0,) * turn.written, version=self.version,
                      earlier_versions=before)
            )  # fmt: skip
            if turn.answer_s:
                await anyio.sleep(turn.answer_s)
        return Rollout(task.id, Ledger(tuple(entries)), StopReason.DONE, group=group, index=index)


class InstantScorer:
    async def score(self, task: Task, rollouts: Sequence[Rollout]) -> ScoredGroup:
        return ScoredGroup(
            task, tuple(ScoredRollout(each, {}, float(each.index), (0.0,) * len(each.turns), True) for each in rollouts)
        )


def run_real_modes(settings: TrainSettings) -> list[Step]:
    """The steps of the trainer's own sources, as the training loop uses them."""
    runner, steps = ScriptedRunner(), list[Step]()
    stream = SimpleNamespace(draw=lambda: TaskDraw(None, 0, Task("task", ())))
    collector = StepCollector(runner, InstantScorer(), settings, lambda extra: None)  # type: ignore[arg-type]

    async def main() -> None:
        async with make_rollout_source(collector, stream, lambda: runner.version) as source:  # type: ignore[arg-type]
            for step in range(1, settings.steps + 1):
                taken = await source.take(step)
                oldest = taken.staleness_metrics(runner.version)["staleness/max"]
                steps.append((anyio.current_time(), len(taken.dropped), int(oldest)))
                await anyio.sleep(UPDATE_S)
                await source.wait_until_idle()
                runner.version = step
                source.on_published()

    anyio.run(main, backend_options=VIRTUAL_CLOCK)
    return steps


def run_simulated_modes(settings: TrainSettings, monkeypatch: pytest.MonkeyPatch) -> list[Step]:
    drawn: list[SimulatedGroup] = []

    def draw_group(self: SimulatedRollouts) -> SimulatedGroup:
        drawn.append(SimulatedGroup(len(drawn), [script_of(len(drawn), index) for index in range(N)], True))
        return drawn[-1]

    monkeypatch.setattr(SimulatedRollouts, "draw_group", draw_group)
    cluster = Cluster(1, EngineSpeed(TOKEN_S), TrainerSpeed(0.0, UPDATE_S))
    limits = JobLimits.from_settings(settings)
    simulation = simulate(limits, Workload(((script_of(0, 0),),)), cluster, steps=STEPS, warmup=0)
    begun, steps = 0.0, []
    for step in simulation.steps:
        steps.append((begun + step.taken_s, step.dropped, step.staleness))
        begun += step.seconds
    return steps


@pytest.mark.parametrize("name", JOBS)
def test_simulated_steps_are_the_real_ones(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = make_settings(JOBS[name])
    real, simulated = run_real_modes(settings), run_simulated_modes(settings, monkeypatch)
    assert [step[1:] for step in simulated] == [step[1:] for step in real]
    assert [step[0] for step in simulated] == pytest.approx([step[0] for step in real], abs=0.02)
