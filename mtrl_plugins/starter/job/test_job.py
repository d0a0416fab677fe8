"""Tests of this job, for plain pytest. They call the real tools and play no model, so they take seconds."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio

from gateway.gateway import Gateway
from gateway.types import ToolCall, ToolResult
from trainer.data.tasks import load_rows
from trainer.load_plugin import load_plugin

JOB = Path(__file__).resolve().parent
TASKS = [json.loads(line) for line in (JOB / "tasks.jsonl").read_text(encoding="utf-8").splitlines()]


def call(tool: str, arguments: dict[str, Any]) -> str:
    """The answer of a tool, called as in a rollout of the first task."""

    async def play() -> ToolResult:
        task = load_rows(str(JOB / "tasks.jsonl"))[0].session_task
        async with Gateway.load(str(JOB / "tools"), JOB / "mcp_servers.json") as gateway, gateway.open(task) as session:
            return await session.call(ToolCall("call-1", tool, json.dumps(arguments)))

    return anyio.run(play).text


def attempt(*turns: str, truth: str = "7") -> Any:
    """What a reward function reads of a rollout in which the policy wrote these turns."""
    return SimpleNamespace(answer=turns[-1], truth=truth, turns=[SimpleNamespace(calls=()) for _ in turns])


def test_look_up_knows_the_facts_of_its_task() -> None:
    city = TASKS[0]["prompt"].removeprefix("How many people live in ").removesuffix("?")
    assert call("look_up", {"name": city}) == TASKS[0]["ground_truth"]
    assert call("look_up", {"name": "Atlantis"}) == "unknown"


def test_calculator_adds_and_refuses_what_is_no_sum() -> None:
    assert call("calculate", {"expression": "30 + 12"}) == "42"
    assert "is not two whole numbers" in call("calculate", {"expression": "open the door"})


def test_reward_is_lower_for_a_second_try_and_nothing_for_a_wrong_answer() -> None:
    right = load_plugin(f"{JOB / 'rewards.py'}:right", "reward")
    assert right(attempt("#### 7")) == 1.0
    assert right(attempt("#### 8", "#### 7")) == 0.5
    assert right(attempt("#### 8")) == 0.0


def test_judge_gives_one_second_try() -> None:
    async def visit() -> list[tuple[bool, float | None]]:
        judge = load_plugin(f"{JOB / 'tools' / 'judge.py'}:JudgeInteraction", "interaction")({"name": "judge"})
        instance = await judge.start_interaction(ground_truth="7")
        answers = [await judge.generate_response(instance, [{"role": "assistant", "content": "#### 8"}]) for _ in "12"]
        await judge.finalize_interaction(instance)
        return [(is_over, score) for is_over, _, score, _ in answers]

    assert anyio.run(visit) == [(False, 0.0), (True, 0.0)]


def test_every_task_has_an_id_of_its_own_and_an_answer() -> None:
    assert len({task["id"] for task in TASKS}) == len(TASKS)
    assert all(task["ground_truth"] for task in TASKS)
