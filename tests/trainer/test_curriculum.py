"""The curriculum: the order of tasks and their stages, deterministic and resumable."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from itertools import islice
from typing import Any

import pytest
from pydantic import ValidationError

from gateway.types import ToolSpec
from trainer.data import Curriculum, Stage, TaskStream, load_rows
from trainer.data.curriculum import CurriculumProgress, TaskOutcomes
from trainer.rollout.task import Task

SPECS = [ToolSpec("add"), ToolSpec("look"), ToolSpec("feedback_gsm8k", audience="loop")]


def tasks(count: int, name: str = "t") -> list[Task]:
    return list(load_rows([{"id": f"{name}{place}", "prompt": "?", "answer": place} for place in range(count)]))


def curriculum(*stages: dict[str, Any]) -> Curriculum:
    return Curriculum.model_validate({"stages": stages})


def stages_of(plan: Curriculum, *successes: float | None) -> list[int]:
    """The stage in which each step was made."""
    standing, stages = CurriculumProgress(), []
    for step, success in enumerate(successes):
        stages.append(standing.stage)
        standing = plan.advance(standing, step, success)
    return stages


@pytest.fixture(autouse=True)
def two_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Success is averaged over two steps."""
    monkeypatch.setattr("trainer.data.curriculum.RECENT_STEPS", 2)


@pytest.mark.parametrize(
    ("until", "successes", "stages"),
    [
        (({"step": 2}, {"step": 3}), (0, 0, 0, 0, 0), [0, 0, 1, 2, 2]),
        (({"success": 0.5}, {"success": 1.0}), (0, 1.0, 1.0, 1.0, 0), [0, 0, 1, 1, 2]),
        (({"success": 1.0}, {"success": 1.0}), (1, None, None, 1, 1, None, 1, 0), [0, 0, 0, 0, 1, 1, 1, 2]),
    ],
)
def test_stage_lasts_until_its_step_or_success_over_its_own_scored_steps(
    until: tuple[dict[str, Any], ...], successes: tuple[float | None, ...], stages: list[int]
) -> None:
    assert stages_of(curriculum(*({"until": each} for each in until), {}), *successes) == stages


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


PLAN = curriculum({"until": {"success": 1.0}, "tools": ["add"]}, {"until": {"step": 6}, "data": "hard"}, {"tools": []})


def draw(course: TaskStream, steps: range) -> list[tuple[str, tuple[str, ...] | None]]:
    drawn = []
    for step in steps:
        drawn += [(task.id, task.session_task.tools) for task in islice(course, 2)]
        course.finish_step(step, 1.0)
    return drawn


@pytest.mark.parametrize("stop", range(8))
def test_task_stream_resumes_at_its_position(stop: int) -> None:
    data = {None: tasks(4, "easy"), "hard": tasks(3, "hard")}
    whole = draw(TaskStream(PLAN, data, seed=5), range(8))
    course = TaskStream(PLAN, data, seed=5)
    first = draw(course, range(stop))
    resumed = TaskStream(PLAN, data, seed=5)
    resumed.restore(json.loads(json.dumps(course.position)))
    assert first + draw(resumed, range(stop, 8)) == whole


def test_posterior_of_a_task_tells_learnable_solved_and_hopeless_tasks_apart() -> None:
    outcomes = TaskOutcomes()
    for task, succeeded in (("always", 8), ("never", 0), ("at times", 3)):
        for _ in range(3):
            outcomes.record(task, succeeded, 8)
    assert outcomes.metrics == {"tasks/learnable": 1.0, "tasks/solved": 1.0, "tasks/hopeless": 1.0}
    assert outcomes.learnability("untried") == outcomes.learnability("at times") == 1.0
    assert outcomes.learnability("always") == pytest.approx(6 * 15 / (16 * 17)) == outcomes.learnability("never")
    for _ in range(2):  # The policy has forgotten, or learned: the latest tries count most.
        outcomes.record("always", 4, 8)
    assert outcomes.learnability("always") > 0.9


def test_tasks_of_two_data_sets_with_the_same_id_have_outcomes_of_their_own() -> None:
    one, other = (replace(tasks(1)[0], location=f"{name}.jsonl:1") for name in ("easy", "hard"))
    stream = TaskStream(Curriculum(), {None: [one]})
    for _ in range(4):
        stream.outcomes.record(one.key, 8, 8)
    assert stream.outcomes.learnability(one.key) < stream.outcomes.learnability(other.key) == 1


def test_learnable_tasks_are_preferred_and_a_resumed_stream_draws_the_same() -> None:
    rows = tasks(20)

    def make_stream(prefers: bool) -> TaskStream:
        stream = TaskStream(Curriculum(prefer_learnable=prefers), {None: rows}, seed=3)
        for number in range(10):
            for _ in range(4):
                stream.outcomes.record(rows[number].key, 8 * (number % 2), 8)
        return stream

    stream = make_stream(True)
    drawn = Counter(int(next(stream).id[1:]) >= 10 for _ in range(200))
    assert drawn[True] > 2 * drawn[False] > 10, "tasks that teach nothing are still tried at times"
    plain = make_stream(False), TaskStream(Curriculum(), {None: rows}, seed=3)
    assert len({tuple(task.id for task in islice(each, 30)) for each in plain}) == 1, (
        "by default outcomes change nothing"
    )
    resumed = TaskStream(Curriculum(prefer_learnable=True), {None: rows}, seed=3)
    resumed.restore(json.loads(json.dumps(stream.position)))
    assert [next(resumed).id for _ in range(50)] == [next(stream).id for _ in range(50)]
