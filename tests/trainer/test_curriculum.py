"""The curriculum: the order of tasks and their stages, deterministic and resumable."""

from __future__ import annotations

import json
from collections import Counter
from itertools import islice
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from gateway.types import ToolSpec
from trainer.data import Curriculum, Stage, TaskSampler, TaskStream, load_rows
from trainer.data.curriculum import CurriculumProgress
from trainer.data.tasks import epoch_order
from trainer.rollout.task import Task

ORDER = [0, 3, 7, 4, 1, 5, 2, 6]
SPECS = [ToolSpec("add"), ToolSpec("look"), ToolSpec("feedback_gsm8k", audience="loop")]


def tasks(count: int, name: str = "t") -> list[Task]:
    return list(load_rows([{"id": f"{name}{place}", "prompt": "?", "answer": place} for place in range(count)]))


def curriculum(*stages: dict[str, Any]) -> Curriculum:
    return Curriculum.model_validate({"stages": stages})


@given(st.integers(1, 40), st.integers(), st.integers(0, 5))
def test_epoch_has_every_task_once(count: int, seed: int, epoch: int) -> None:
    assert sorted(epoch_order(count, seed, epoch)) == list(range(count))
    assert epoch_order(count, seed, epoch) == epoch_order(count, seed, epoch)


def test_task_order_is_the_same_on_every_machine() -> None:
    assert epoch_order(8, 0, 0) == ORDER
    assert epoch_order(8, 0, 1) != ORDER != epoch_order(8, 1, 0)


@given(st.integers(1, 9), st.integers(0, 30), st.integers(0, 9))
def test_drawing_continues_from_a_saved_position(count: int, drawn: int, seed: int) -> None:
    given = tasks(count)
    sampler = TaskSampler(given, seed=seed)
    ids = [task.id for task in islice(sampler, drawn + 10)]
    assert sampler.drawn == drawn + 10
    assert [task.id for task in islice(TaskSampler(given, seed=seed, drawn=drawn), 10)] == ids[drawn:]


def test_drawing_ends_with_the_last_epoch() -> None:
    sampler = TaskSampler(tasks(3), epochs=2)
    assert Counter(task.id for task in sampler) == {"t0": 2, "t1": 2, "t2": 2}
    assert list(sampler) == []
    with pytest.raises(ValueError, match="there are no tasks to draw"):
        TaskSampler([])


def test_unshuffled_rows_keep_their_order_in_every_epoch() -> None:
    given = tasks(3)
    course = TaskStream(Curriculum(shuffled=False), {None: given}, seed=5)
    assert [task.id for task in islice(course, 7)] == ["t0", "t1", "t2"] * 2 + ["t0"]
    other = TaskStream(Curriculum(), {None: given}, seed=5)
    assert [task.id for task in islice(other, 9)] != ["t0", "t1", "t2"] * 3


def stages_of(plan: Curriculum, *successes: float | None) -> list[int]:
    """The stage in which each step was made."""
    standing, stages = CurriculumProgress(), []
    for step, success in enumerate(successes):
        stages.append(standing.stage)
        standing = plan.advance(standing, step, success)
    return stages


def test_stage_lasts_until_its_step() -> None:
    plan = curriculum({"until": {"step": 2}}, {"until": {"step": 3}}, {})
    assert stages_of(plan, 0, 0, 0, 0, 0) == [0, 0, 1, 2, 2]


def test_stage_lasts_until_success_over_its_latest_steps() -> None:
    plan = curriculum({"until": {"success": 0.5, "over": 2}}, {"until": {"success": 1.0, "over": 1}}, {})
    assert stages_of(plan, 0, 1.0, 0.9, 1.0, 0) == [0, 0, 1, 1, 2]


def test_success_counts_within_its_stage_and_for_scored_steps() -> None:
    plan = curriculum({"until": {"success": 1.0, "over": 2}}, {"until": {"success": 1.0, "over": 2}}, {})
    assert stages_of(plan, 1.0, None, None, 1.0, 1.0, None, 1.0, 0) == [0, 0, 0, 0, 1, 1, 1, 2]


def test_stage_that_ends_before_it_starts_is_skipped() -> None:
    plan = curriculum({"until": {"success": 1.0, "over": 1}}, {"until": {"step": 2}}, {"until": {"step": 3}}, {})
    assert stages_of(plan, 0, 0, 0, 0, 1.0, 0) == [0, 0, 0, 0, 0, 3]


@given(st.lists(st.none() | st.floats(0, 1), max_size=30))
def test_stages_are_never_revisited(successes: list[float | None]) -> None:
    plan = curriculum({"until": {"success": 0.6, "over": 3}}, {"until": {"step": 15}}, {})
    stages = stages_of(plan, *successes)
    assert stages == sorted(stages)


@pytest.mark.parametrize(
    ("stages", "told"),
    [
        ([], "at least 1"),
        ([{}, {}], "stage 1 of 2: all stages but the last need an `until`"),
        ([{"until": {"step": 3}}], "stage 1 of 1"),
        ([{"until": {"step": 3}}, {"until": {"step": 3}}, {}], r"stages end at steps \[3, 3\], which must increase"),
        ([{"until": {"step": 3, "success": 0.5}}, {}], "set either `step` or `success`: when the stage ends"),
        ([{"until": {}}, {}], "set either `step` or `success`: when the stage ends"),
        ([{"until": {"success": 80}}, {}], "less than or equal to 1"),
        ([{"tool": ["add"]}], "Extra inputs"),
        ([{"interaction": True}], "interaction"),
    ],
)
def test_invalid_curriculum_is_reported(stages: list[dict[str, Any]], told: str) -> None:
    with pytest.raises(ValidationError, match=told):
        curriculum(*stages)


def test_empty_stage_changes_nothing() -> None:
    row = {"prompt": "?", "tools": ["add"], "interaction_kwargs": {"name": "gsm8k", "ground_truth": "1"}}
    task = load_rows([row])[0]
    assert Stage().apply(task) == task


def test_stage_limits_the_tools_of_its_rows() -> None:
    stage = Stage(tools=("add", "look"))
    free, bound = load_rows(
        [{"prompt": "1"}, {"prompt": "2", "tools": ["look", "dig"], "tools_kwargs": {"dig": {}, "look": {}}}]
    )
    assert stage.apply(free).session_task.tools == ("add", "look")
    assert stage.apply(bound).session_task.tools == ("look",)
    assert stage.apply(bound).session_task.create == {"look": {}}


def test_stage_interaction_gets_the_rows_arguments_or_its_truth() -> None:
    own, plain, bare = load_rows(
        [{"prompt": "1", "interaction_kwargs": {"x": 1}}, {"prompt": "2", "answer": "3"}, {"prompt": "3"}]
    )
    stage = Stage(interaction="gsm8k")
    assert (stage.apply(own).session_task.feedback, stage.apply(own).session_task.feedback_args) == ("gsm8k", {"x": 1})
    assert stage.apply(plain).session_task.feedback_args == {"ground_truth": "3"}
    assert stage.apply(bare).session_task.feedback_args == {}
    assert stage.apply(plain).has_feedback and stage.apply(bare).has_feedback
    assert not Stage(interaction=False).apply(own).has_feedback


def test_names_in_stages_are_checked_against_the_gateway() -> None:
    plan = curriculum({"until": {"step": 1}, "tools": ["ad", "look"]}, {"interaction": "gsm8"})
    assert [str(error) for error in plan.check_names(SPECS)] == [
        "curriculum.stages[0].tools: the gateway offers no 'ad'\n  remedy: did you mean 'add'?",
        "curriculum.stages[1].interaction: the gateway offers no 'gsm8'\n  remedy: did you mean 'gsm8k'?",
    ]
    assert curriculum({"tools": ["add"], "interaction": "gsm8k"}).check_names(SPECS) == []


PLAN = curriculum(
    {"until": {"success": 1.0, "over": 2}, "tools": ["add"]}, {"until": {"step": 6}, "data": "hard"}, {"tools": []}
)


def draw(course: TaskStream, steps: range) -> list[tuple[str, tuple[str, ...] | None]]:
    drawn = []
    for step in steps:
        drawn += [(task.id, task.session_task.tools) for task in islice(course, 2)]
        course.finish_step(step, 1.0)
    return drawn


def test_task_stream_draws_each_stages_tasks() -> None:
    data = {None: tasks(4, "easy"), "hard": tasks(3, "hard")}
    drawn = draw(TaskStream(PLAN, data), range(8))
    assert [(id[:4], tools) for id, tools in drawn] == (
        [("easy", ("add",))] * 4 + [("hard", None)] * 8 + [("easy", ())] * 4
    )
    assert len({id for id, _ in drawn[:4]}) == 4  # The last stage begins a new epoch of the same data.


@pytest.mark.parametrize("stop", range(8))
def test_task_stream_resumes_at_its_position(stop: int) -> None:
    data = {None: tasks(4, "easy"), "hard": tasks(3, "hard")}
    whole = draw(TaskStream(PLAN, data, seed=5), range(8))
    course = TaskStream(PLAN, data, seed=5)
    first = draw(course, range(stop))
    resumed = TaskStream(PLAN, data, seed=5)
    resumed.restore(json.loads(json.dumps(course.position)))
    assert first + draw(resumed, range(stop, 8)) == whole
