"""The demo of made tasks: its rows, its demonstrations, and rollouts on its server scored by what they leave."""

from __future__ import annotations

import re
from itertools import islice
from pathlib import Path

import anyio
import pytest

from gateway.session import AnyGateway
from mtrl_plugins.demo.demos import DemoTasks, load_demo
from mtrl_plugins.demo.problem import Problem
from mtrl_plugins.demo.shelves.shelves_demo import DONE, FILES, KINDS, draw_problem, draw_problems, read_rows
from mtrl_plugins.task_maker.values import split_of
from tests.trainer.conversations import make_template
from tests.trainer.policy_scripts import HERMES, encode_turns, render_calls
from tests.trainer.reward.attempts import reward_settings
from tests.waiting import PATIENCE_S
from trainer.cli.run_file import find_run_file, load_settings
from trainer.engine.scripted import ScriptedEngine
from trainer.reward.scorer import Scorer
from trainer.rollout.loop import RolloutRunner
from trainer.rollout.settings import RolloutLimits
from trainer.setup import make_gateway
from trainer.train.settings import TrainSettings


def test_tasks_are_the_rows_of_their_split_each_before_any_comes_again() -> None:
    rows = [row for kind in KINDS for row in read_rows("held_out", kind)]
    tasks = DemoTasks(load_demo("shelves"), 5, len(rows), "held_out")
    assert {task.columns["id"] for task in tasks} == {row["id"] for row in rows}
    assert list(tasks) == list(DemoTasks(load_demo("shelves"), 5, len(rows), "held_out"))
    assert all(read_rows(split, kind) for split in FILES for kind in KINDS)


def test_results_page_tells_how_many_tasks_there_are() -> None:
    counts = [sum(len(read_rows(split, kind)) for kind in KINDS) for split in FILES]
    page = " ".join((Path(__file__).parents[3] / "docs" / "results.md").read_text(encoding="utf-8").split())
    assert f"`mtrl-train make-tasks` made {sum(counts)} tasks" in page
    assert f"trained on {counts[0]} of the tasks, and evaluated on {counts[1]}" in page


def test_demonstrations_have_other_numbers_and_none_of_the_held_out_tasks() -> None:
    for problem in islice(draw_problems("test"), 60):
        texts = [str(problem.task.messages[0]["content"]), *(str(call.arguments) for call in problem.calls)]
        numbers = {int(number) for text in texts for number in re.findall(r"\d{3}", text)}
        assert numbers and all(split_of(number) == "train" for number in numbers)
        assert problem.answer == DONE or problem.answer in str(problem.calls[-1].result)


def test_job_finds_its_servers_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    settings = load_settings(TrainSettings, find_run_file("mcp-tasks"), {})
    assert settings.mcp is not None and settings.mcp.is_file() and settings.model == settings.data == "shelves"


async def score(gateway: AnyGateway, problem: Problem, turns: list[str]) -> float:
    template = make_template(HERMES)
    left = iter(encode_turns(template, *turns))
    async with ScriptedEngine(lambda ids, sampling, key: next(left)) as engine:
        runner = RolloutRunner(engine, template, gateway, RolloutLimits(rollout_tokens=100_000))
        rollout = await runner.run(problem.task)
    settings = reward_settings(solved={"function": "solved"})
    (scored,) = (await Scorer(settings).score(problem.task, [rollout])).scored
    return scored.reward


async def test_gold_calls_are_rewarded_and_guesses_are_not() -> None:
    settings = load_settings(TrainSettings, find_run_file("mcp-tasks"), {})
    with anyio.fail_after(PATIENCE_S):
        async with make_gateway(settings) as gateway:
            for kind in KINDS:
                problem = draw_problem(0, 0, kind, "held_out")
                calls = [render_calls((call.tool, dict(call.arguments))) for call in problem.calls]
                assert await score(gateway, problem, [*calls, f"#### {problem.answer}"]) == 1.0
                assert await score(gateway, problem, [*calls[:-1], "#### 100"]) == 0.0
