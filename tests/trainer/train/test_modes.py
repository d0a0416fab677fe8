"""Training modes: admission, order and staleness of every token, determinism, resuming and replay."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import anyio
import pytest
from anyio import wait_all_tasks_blocked

from tests.trainer.policy_scripts import make_tasks
from tests.trainer.rollout_harness import BlockingTool, RolloutHarness, blocking_turns, open_harness
from tests.trainer.train.jobs import SMALL, small_job
from tests.trainer.train.trainings import string_console as string_console
from tests.trainer.train.trainings import write_tools
from tests.waiting import PATIENCE_S
from trainer.data.curriculum import Curriculum, TaskStream
from trainer.policy.update import PolicyUpdater
from trainer.reward.scorer import Scorer
from trainer.rollout.rollout import Rollout, StopReason
from trainer.storage.rollout_file import Rollouts
from trainer.train.collect import StepCollector, StepRollouts
from trainer.train.job import load_tasks
from trainer.train.modes import AsyncRollouts
from trainer.train.replay_step import replay_step
from trainer.train.settings import TrainSettings
from trainer.train.start import train

STEPS, PROMPTS, N = 5, 3, 4
SEVENTHS = {"components": {"sevenths": {"function": f"{Path(__file__).parent}/sevenths.py:sevenths"}}}


@pytest.fixture(scope="module")
def tools(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_tools(tmp_path_factory.mktemp("modes"))


def make_job(tools: str, mode: str, **more: Any) -> TrainSettings:
    defaults = {"steps": STEPS, "prompts": PROMPTS, "n": N, "reward": SEVENTHS, "evaluation": {"every": 3, "rows": 4}}
    given = {"tools": tools, "mode": mode, "demo": {"kinds": ["fact"]}, "sampling": {"temperature": 1.5}}
    return small_job(**{**given, **defaults, **more})


def read_lines(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines() if '"step": 0' not in line]


def token_ages(rollout: Rollout, version: int) -> list[int]:
    """Of each token that was written."""
    versions = [one for one in rollout.ledger.versions if one is not None]
    return [version - one for one in versions]


def rollouts_by_step(run: Path) -> dict[int, list[Rollout]]:
    """What each step learned from, as it names it or as its groups do."""
    steps: dict[int, list[Rollout]] = {}
    for one in Rollouts(run):
        steps.setdefault(one.step or int(one.group.split("-")[0]), []).append(one)
    return steps


@pytest.fixture(scope="module")
async def off(tools: str, tmp_path_factory: pytest.TempPathFactory, anyio_backend: str) -> Path:
    run = tmp_path_factory.mktemp("off") / "run"
    await train(make_job(tools, "one_step_off"), run, string_console())
    return run


@pytest.fixture(scope="module")
async def flow(tools: str, tmp_path_factory: pytest.TempPathFactory, anyio_backend: str) -> Path:
    run = tmp_path_factory.mktemp("flow") / "run"
    await train(make_job(tools, "asynchronous", max_staleness=2), run, string_console())
    return run


def test_one_step_off_rollouts_are_one_version_behind(off: Path) -> None:
    for step, rollouts in rollouts_by_step(off).items():
        assert len(rollouts) == PROMPTS * N
        assert {age for one in rollouts for age in token_ages(one, step - 1)} == {min(1, step - 1)}
    lines = read_lines(off)
    assert [line["staleness/max"] for line in lines] == [0.0, 1.0, 1.0, 1.0, 1.0]
    assert [line.get("staleness/age_1", 0.0) for line in lines] == [0.0, 1.0, 1.0, 1.0, 1.0]
    assert lines[0]["mismatch/max"] < 1e-4 and all("staleness/kl" in line for line in lines[1:])
    assert not any("mismatch/max" in line for line in lines[1:])  # Nobody knows what the engine's part is of that.
    assert all(line["engine/waiting_s"] >= 0 and line["time/waiting_s"] >= 0 for line in lines)


def test_asynchronous_steps_respect_max_staleness_and_train_each_rollout_once(flow: Path) -> None:
    steps = rollouts_by_step(flow)
    learned = {step: rollouts for step, rollouts in steps.items() if step}
    assert sorted(learned) == [*range(1, STEPS + 1)]
    for step, rollouts in learned.items():
        assert len({one.group for one in rollouts}) == PROMPTS and len(rollouts) == PROMPTS * N
        assert all(0 <= age <= 2 for one in rollouts for age in token_ages(one, step - 1))
    lines = read_lines(flow)
    assert sum(line["staleness/dropped"] for line in lines) == len({one.group for one in steps.get(0, ())})
    for line in lines:
        counted = Counter(age for one in learned[line["step"]] for age in token_ages(one, line["step"] - 1))
        shares = {age: line.get(f"staleness/age_{age}", 0.0) for age in range(3)}
        assert shares == {age: pytest.approx(counted[age] / counted.total()) for age in range(3)}
        assert line["staleness/max"] == max(counted)


def expected_draws(settings: TrainSettings, count: int) -> Counter[str]:
    """The first tasks of the run's order."""
    course = TaskStream(settings.curriculum, load_tasks(settings).train, seed=settings.seed)
    return Counter(task.id for task in islice(course, count))


def tasks_by_group(run: Path) -> dict[str, str]:
    return {one.group: one.task for one in Rollouts(run)}


def test_asynchronous_run_draws_each_task_once_in_order(flow: Path) -> None:
    asked = tasks_by_group(flow)
    assert Counter(asked.values()) == expected_draws(make_job("", "asynchronous"), len(asked))


@pytest.mark.parametrize("mode", ["one_step_off", "asynchronous"])
async def test_resumed_run_repeats_rollouts_that_were_under_way(
    mode: str, tools: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, run, learn = make_job(tools, mode, max_staleness=2), tmp_path / "run", PolicyUpdater.train_step

    def fails(self: PolicyUpdater, given: Any) -> dict[str, float]:
        if self._policy.steps == 2:
            raise RuntimeError("the light went out")
        return learn(self, given)

    monkeypatch.setattr(PolicyUpdater, "train_step", fails)
    with pytest.RaisesGroup(pytest.RaisesExc(RuntimeError, match="the light went out"), flatten_subgroups=True):
        await train(settings, run, string_console())
    cut_off = tasks_by_group(run)
    assert len(cut_off) > 3 * PROMPTS - 1  # What was over, and what step 3 was given, is there to be read.
    monkeypatch.undo()
    await train(settings, run, string_console(), resume=True)
    assert [line["step"] for line in read_lines(run)] == [*range(1, STEPS + 1)]
    asked = tasks_by_group(run)
    assert len(Rollouts(run)) == len({(one.group, one.index) for one in Rollouts(run)}) == len(asked) * N
    assert Counter(asked.values()) == expected_draws(settings, len(asked))
    for step, rollouts in rollouts_by_step(run).items():
        assert not step or len(rollouts) == PROMPTS * N
    for step in (2, 3, 5):
        console = string_console()
        assert await replay_step(run, step, console), console.file.getvalue()  # type: ignore[attr-defined]


ASYNC_SEVENTHS = {"components": {"sevenths": {"function": f"{Path(__file__).parent}/sevenths.py:async_sevenths"}}}
NAMES = [f"t{place:02}" for place in range(40)]


class QueueRun:
    """A source, and the version of the weights."""

    def __init__(self, at: RolloutHarness, tool: BlockingTool, **settings: Any) -> None:
        chosen = {
            "reward": ASYNC_SEVENTHS, "mode": "asynchronous", "prompts": 2, "n": 2, "steps": 6, "max_staleness": 1,
        } | settings  # fmt: skip
        self.settings, self.at = TrainSettings.model_validate(SMALL | chosen), at
        self.tool, self.version = tool, 0
        self.stream = TaskStream(Curriculum(), {None: make_tasks(*NAMES)})
        collector = StepCollector(at.runner, Scorer(self.settings.reward), self.settings, lambda _: None)
        self.source = AsyncRollouts(collector, self.stream, lambda: self.version)

    @property
    def started(self) -> list[str]:
        """Tasks, in order."""
        return list(dict.fromkeys(key.split("/")[1] for key in self.at.request_keys))

    async def wait_until_settled(self) -> None:
        """Until all that is open is over, but for those that stand at a door which is shut."""
        with anyio.fail_after(PATIENCE_S):
            while not all(
                name in {one.name for one in self.source._queue}
                or (draw.task.id in self.started and not self.tool.event(draw.task.id).is_set())
                for name, draw in self.source._draws.items()
            ):
                await anyio.sleep(0.005)
                await wait_all_tasks_blocked()

    async def take(self) -> StepRollouts:
        """And new weights after it, as a step does."""
        await self.wait_until_settled()
        taken = await self.source.take(self.version + 1)
        await self.at.engine.publish({}, self.version + 1)
        self.version += 1
        self.stream.mark_done(taken.draws)
        self.source.on_published()
        await wait_all_tasks_blocked()
        await self.wait_until_settled()
        return taken


@asynccontextmanager
async def open_queue(
    tool: BlockingTool, slow: Callable[[str], bool] = lambda _: False, **settings: Any
) -> AsyncIterator[QueueRun]:
    """Each task knocks at its own door; all but slow ones' are open."""
    async with open_harness({name: blocking_turns(name) for name in NAMES}, tool.block) as at:
        run = QueueRun(at, tool, **settings)
        for name in NAMES:
            if not slow(name):
                tool.event(name).set()
        async with run.source:
            await wait_all_tasks_blocked()
            await run.wait_until_settled()
            yield run


def draw_ids(stream: TaskStream, count: int) -> list[str]:
    return [stream.draw().task.id for _ in range(count)]


def task_order(count: int) -> list[str]:
    return draw_ids(TaskStream(Curriculum(), {None: make_tasks(*NAMES)}), count)


def task_ids(taken: StepRollouts) -> list[str]:
    return [group.task.id for group in taken.groups]


async def test_groups_are_not_started_when_they_would_become_too_stale() -> None:
    async with open_queue(BlockingTool()) as run:
        assert run.started == task_order(4)
        assert task_ids(await run.take()) == task_order(2)
        assert run.started == task_order(6) and run.stream.position["drawn"] == [[None, 6]]
        for _ in range(4):
            await run.take()
        assert run.started == task_order(12)  # The last step's, and nothing that no step would have.
        assert task_ids(await run.take()) == task_order(12)[10:] and run.stream.position["open"] == []


async def test_slow_group_delays_nobody_and_is_dropped_when_too_stale() -> None:
    tool, slow = BlockingTool(), task_order(1)[0]
    async with open_queue(tool, lambda name: name == slow) as run:
        assert [task_ids(await run.take()) for _ in range(2)] == [task_order(5)[1:3], task_order(5)[3:]]
        tool.event(slow).set()
        await wait_all_tasks_blocked()
        taken = await run.take()
    assert [group.task.id for group in taken.dropped] == [slow] and slow not in task_ids(taken)
    assert len(taken.groups) == 2 and taken.staleness_metrics(2)["staleness/dropped"] == 1
    assert taken.metrics(2)["rollout/cut/task"] == 2, "what was cut is counted by the kind of task"
    kept = [one for one in taken.rollouts if one.task == slow]
    assert len(kept) == 2 and all(one.step is None and one.rewards for one in kept)
    assert {one.step for one in taken.rollouts if one.task != slow} == {3}


async def test_group_at_the_staleness_limit_is_trained_and_its_ages_are_metrics() -> None:
    tool, slow = BlockingTool(), task_order(1)[0]
    async with open_queue(tool, lambda name: name == slow, max_staleness=2) as run:
        for _ in range(2):
            await run.take()
        tool.event(slow).set()
        await wait_all_tasks_blocked()
        mine = await run.take()
    assert slow in task_ids(mine)
    rollout = next(one for one in mine.rollouts if one.task == slow)
    asked, answered = rollout.turns
    assert (asked.version, answered.version) == (0, 2)  # The call, and what was made of its answer.
    metrics = mine.staleness_metrics(2)
    assert metrics["staleness/max"] == 2 and not mine.dropped and 0 < metrics["staleness/age_2"] < 1
    assert sum(share for name, share in metrics.items() if "/age_" in name) == pytest.approx(1)


async def test_unfinished_groups_are_drawn_again_after_a_stop_and_finished_rollouts_are_kept() -> None:
    tool, (slow, quick) = BlockingTool(), task_order(2)
    async with open_queue(tool, lambda name: name == slow) as run:
        await run.take()
        pending = [one for rolled in run.source.pending for one in rolled.rollouts]
        position = run.stream.position
    assert {one.task for one in pending} == {*task_order(6)[3:]} and quick not in {one.task for one in pending}
    again = TaskStream(Curriculum(), {None: make_tasks(*NAMES)})
    again.restore(position)
    assert draw_ids(again, 5) == [slow, *task_order(6)[3:], task_order(7)[6]]


async def test_step_continues_with_fewer_groups_after_an_infrastructure_failure() -> None:
    tool, lost = BlockingTool(), task_order(1)[0]
    async with open_harness({name: blocking_turns(name) for name in NAMES if name != lost}, tool.block) as at:
        run = QueueRun(at, tool, max_retries=0)
        for name in NAMES:
            tool.event(name).set()
        async with run.source:
            await wait_all_tasks_blocked()
            taken = await run.take()
    assert task_ids(taken) == [task_order(2)[1]] and {one.stop for one in taken.rollouts if one.task == lost} == {
        StopReason.ERROR
    }
    metrics = taken.metrics(2)
    assert metrics["rollout/lost"] == metrics["lost/error"] == 2
