"""Which task comes when, and under which stage, is the same whenever it is asked again."""

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
from trainer.data import Course, Curriculum, Sampler, Stage, load
from trainer.data.curriculum import Standing
from trainer.data.sampler import order
from trainer.task import Task

ORDER = [0, 3, 7, 4, 1, 5, 2, 6]
SPECS = [ToolSpec("add"), ToolSpec("look"), ToolSpec("feedback_gsm8k", audience="loop")]


def tasks(count: int, name: str = "t") -> list[Task]:
    return list(load([{"id": f"{name}{place}", "prompt": "?", "answer": place} for place in range(count)]))


def curriculum(*stages: dict[str, Any]) -> Curriculum:
    return Curriculum.model_validate({"stages": stages})


@given(st.integers(1, 40), st.integers(), st.integers(0, 5))
def test_an_epoch_has_every_task_once(count: int, seed: int, epoch: int) -> None:
    assert sorted(order(count, seed, epoch)) == list(range(count))
    assert order(count, seed, epoch) == order(count, seed, epoch)


def test_an_order_is_the_same_on_every_machine() -> None:
    assert order(8, 0, 0) == ORDER
    assert order(8, 0, 1) != ORDER != order(8, 1, 0)


@given(st.integers(1, 9), st.integers(0, 30), st.integers(0, 9))
def test_drawing_goes_on_where_it_stopped(count: int, drawn: int, seed: int) -> None:
    given = tasks(count)
    sampler = Sampler(given, seed=seed)
    ids = [task.id for task in islice(sampler, drawn + 10)]
    assert sampler.drawn == drawn + 10
    assert [task.id for task in islice(Sampler(given, seed=seed, drawn=drawn), 10)] == ids[drawn:]


def test_drawing_ends_with_the_last_epoch() -> None:
    sampler = Sampler(tasks(3), epochs=2)
    assert Counter(task.id for task in sampler) == {"t0": 2, "t1": 2, "t2": 2}
    assert list(sampler) == []
    with pytest.raises(ValueError, match="no task to draw"):
        Sampler([])


def test_rows_that_are_not_shuffled_come_as_they_stand_in_every_epoch() -> None:
    given = tasks(3)
    course = Course(Curriculum(shuffled=False), {None: given}, seed=5)
    assert [task.id for task in islice(course, 7)] == ["t0", "t1", "t2"] * 2 + ["t0"]
    other = Course(Curriculum(), {None: given}, seed=5)
    assert [task.id for task in islice(other, 9)] != ["t0", "t1", "t2"] * 3


def stages_of(plan: Curriculum, *successes: float | None) -> list[int]:
    """The stage in which each step was made."""
    standing, stages = Standing(), []
    for step, success in enumerate(successes):
        stages.append(standing.stage)
        standing = plan.after(standing, step, success)
    return stages


def test_a_stage_holds_until_its_step() -> None:
    plan = curriculum({"until": {"step": 2}}, {"until": {"step": 3}}, {})
    assert stages_of(plan, 0, 0, 0, 0, 0) == [0, 0, 1, 2, 2]


def test_a_stage_holds_until_success_over_its_latest_steps() -> None:
    plan = curriculum({"until": {"success": 0.5, "over": 2}}, {"until": {"success": 1.0, "over": 1}}, {})
    assert stages_of(plan, 0, 1.0, 0.9, 1.0, 0) == [0, 0, 1, 1, 2]


def test_success_counts_only_within_its_stage_and_where_something_was_scored() -> None:
    plan = curriculum({"until": {"success": 1.0, "over": 2}}, {"until": {"success": 1.0, "over": 2}}, {})
    assert stages_of(plan, 1.0, None, None, 1.0, 1.0, None, 1.0, 0) == [0, 0, 0, 0, 1, 1, 1, 2]


def test_a_step_that_has_passed_is_no_stage() -> None:
    plan = curriculum({"until": {"success": 1.0, "over": 1}}, {"until": {"step": 2}}, {"until": {"step": 3}}, {})
    assert stages_of(plan, 0, 0, 0, 0, 1.0, 0) == [0, 0, 0, 0, 0, 3]


@given(st.lists(st.none() | st.floats(0, 1), max_size=30))
def test_stages_are_never_gone_back_to(successes: list[float | None]) -> None:
    plan = curriculum({"until": {"success": 0.6, "over": 3}}, {"until": {"step": 15}}, {})
    stages = stages_of(plan, *successes)
    assert stages == sorted(stages)


@pytest.mark.parametrize(
    ("stages", "told"),
    [
        ([], "at least 1"),
        ([{}, {}], "stage 1 of 2: all but the last stage have an `until`"),
        ([{"until": {"step": 3}}], "stage 1 of 1"),
        ([{"until": {"step": 3}}, {"until": {"step": 3}}, {}], r"steps \[3, 3\], which do not rise"),
        ([{"until": {"step": 3, "success": 0.5}}, {}], "at a `step` or with `success`"),
        ([{"until": {}}, {}], "at a `step` or with `success`"),
        ([{"until": {"success": 80}}, {}], "less than or equal to 1"),
        ([{"tool": ["add"]}], "Extra inputs"),
        ([{"interaction": True}], "interaction"),
    ],
)
def test_a_wrong_curriculum_says_what_is_wrong(stages: list[dict[str, Any]], told: str) -> None:
    with pytest.raises(ValidationError, match=told):
        curriculum(*stages)


def test_a_stage_that_says_nothing_changes_nothing() -> None:
    row = {"prompt": "?", "tools": ["add"], "interaction_kwargs": {"name": "gsm8k", "ground_truth": "1"}}
    task = load([row])[0]
    assert Stage().of(task) == task


def test_a_stages_tools_are_those_that_a_row_may_choose_from() -> None:
    stage = Stage(tools=("add", "look"))
    free, bound = load(
        [{"prompt": "1"}, {"prompt": "2", "tools": ["look", "dig"], "tools_kwargs": {"dig": {}, "look": {}}}]
    )
    assert stage.of(free).asked.tools == ("add", "look")
    assert stage.of(bound).asked.tools == ("look",)
    assert stage.of(bound).asked.create == {"look": {}}


def test_a_stages_interaction_is_told_what_the_row_says_or_the_truth() -> None:
    own, plain, bare = load(
        [{"prompt": "1", "interaction_kwargs": {"x": 1}}, {"prompt": "2", "answer": "3"}, {"prompt": "3"}]
    )
    stage = Stage(interaction="gsm8k")
    assert (stage.of(own).asked.feedback, stage.of(own).asked.feedback_args) == ("gsm8k", {"x": 1})
    assert stage.of(plain).asked.feedback_args == {"ground_truth": "3"}
    assert stage.of(bare).asked.feedback_args == {}
    assert stage.of(plain).has_feedback and stage.of(bare).has_feedback
    assert not Stage(interaction=False).of(own).has_feedback


def test_names_in_stages_are_held_against_what_is_offered() -> None:
    plan = curriculum({"until": {"step": 1}, "tools": ["ad", "look"]}, {"interaction": "gsm8"})
    assert [str(error) for error in plan.check(SPECS)] == [
        "curriculum.stages[0].tools: the gateway offers no 'ad'\n  remedy: did you mean 'add'?",
        "curriculum.stages[1].interaction: the gateway offers no 'gsm8'\n  remedy: did you mean 'gsm8k'?",
    ]
    assert curriculum({"tools": ["add"], "interaction": "gsm8k"}).check(SPECS) == []


PLAN = curriculum(
    {"until": {"success": 1.0, "over": 2}, "tools": ["add"]}, {"until": {"step": 6}, "data": "hard"}, {"tools": []}
)


def draw(course: Course, steps: range) -> list[tuple[str, tuple[str, ...] | None]]:
    drawn = []
    for step in steps:
        drawn += [(task.id, task.asked.tools) for task in islice(course, 2)]
        course.tell(step, 1.0)
    return drawn


def test_a_course_draws_each_stages_tasks() -> None:
    data = {None: tasks(4, "easy"), "hard": tasks(3, "hard")}
    drawn = draw(Course(PLAN, data), range(8))
    assert [(id[:4], tools) for id, tools in drawn] == (
        [("easy", ("add",))] * 4 + [("hard", None)] * 8 + [("easy", ())] * 4
    )
    assert len({id for id, _ in drawn[:4]}) == 4  # The last stage begins a new epoch of the same data.


@pytest.mark.parametrize("stop", range(8))
def test_a_course_goes_on_exactly_where_it_stopped(stop: int) -> None:
    data = {None: tasks(4, "easy"), "hard": tasks(3, "hard")}
    whole = draw(Course(PLAN, data, seed=5), range(8))
    course = Course(PLAN, data, seed=5)
    first = draw(course, range(stop))
    resumed = Course(PLAN, data, seed=5)
    resumed.resume(json.loads(json.dumps(course.position)))
    assert first + draw(resumed, range(stop, 8)) == whole
