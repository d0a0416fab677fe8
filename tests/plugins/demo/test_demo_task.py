"""The demo's tasks: deterministic, balanced, and solvable by a perfect policy."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from random import Random

import pytest

from gateway.session import AnyGateway
from gateway.types import Task as SessionTask
from mtrl_plugins.agents import demo_agent
from mtrl_plugins.demo.demos import DemoTasks
from mtrl_plugins.demo.facts import facts_tasks
from mtrl_plugins.demo.facts.facts_demo import DEMO, build_tokenizer
from mtrl_plugins.demo.facts.facts_tasks import KINDS, TOOLS, TRAILS, draw_problem, draw_problems
from mtrl_plugins.demo.problem import Problem
from mtrl_plugins.demo.warm_start import DemonstrationWriter
from tests.plugins.agents.agent_harness import call_text, open_agents
from trainer.cli.options import find_jobs
from trainer.cli.run_file import load_settings
from trainer.engine.base import Sampling
from trainer.engine.scripted import Answer, ScriptedEngine
from trainer.ledger import Author, Message
from trainer.reward.attempt import Attempt
from trainer.reward.functions import outcome
from trainer.rollout.loop import RolloutRunner
from trainer.rollout.rollout import StopReason
from trainer.rollout.settings import BaseRolloutSettings, RolloutLimits
from trainer.setup import make_gateway
from trainer.template import Template
from trainer.train.settings import TrainSettings

FOLDER = Path(__file__).parents[3] / "tool_configs"
PER_KIND = 40


@pytest.fixture(scope="module")
def template() -> Template:
    return Template.load(build_tokenizer())


@pytest.fixture(scope="module")
async def gateway(anyio_backend: str) -> AsyncIterator[AnyGateway]:
    """One for all tests: it starts three servers."""
    async with make_gateway(BaseRolloutSettings(tools=str(FOLDER))) as opened:
        yield opened


def saying(writer: DemonstrationWriter, by_task: dict[str, Sequence[Message]]) -> ScriptedEngine:
    """A policy that says these turns in each task, one after the other."""
    said: Counter[str] = Counter()

    def script(ids: Sequence[int], sampling: Sampling, key: str) -> Answer:
        said[key] += 1
        return writer.encode_turn(by_task[key.split("/")[1]][said[key] - 1])

    return ScriptedEngine(script)


def some(split: str = "train", count: int = PER_KIND * len(KINDS)) -> list[Problem]:
    return list(islice(draw_problems(3, split), count))  # type: ignore[arg-type]


def test_tasks_can_be_indexed_at_any_position() -> None:
    drawn = DemoTasks(DEMO, 3, PER_KIND)
    assert [one.columns["kind"] for one in drawn[:5]] == list(KINDS)
    assert list(drawn) == drawn[:] == [one.task for one in some(count=PER_KIND)]
    assert drawn[-1] == drawn[PER_KIND - 1] == list(drawn)[-1]
    assert drawn[7:3:-2] == [drawn[7], drawn[5]]
    assert {one.columns["kind"] for one in DemoTasks(DEMO, 3, 6, "held_out", ("sum", "hop"))} == {"sum", "hop"}
    with pytest.raises(IndexError):
        drawn[PER_KIND]


def test_held_out_facts_are_never_trained_on() -> None:
    trained = {str((one.task.messages, one.task.columns["facts"])) for one in some()}
    held = {str((one.task.messages, one.task.columns["facts"])) for one in some("held_out")}
    assert len(trained) == len(held) == PER_KIND * len(KINDS)
    assert not trained & held


async def test_perfect_policy_solves_every_kind(template: Template, gateway: AnyGateway) -> None:
    drawn = [*some("held_out"), *islice(draw_problems(3, "held_out", tuple(TRAILS)), PER_KIND * len(TRAILS))]
    engine = saying(DemonstrationWriter(template, TOOLS), {one.task.id: one.turns for one in drawn})
    player = RolloutRunner(engine, template, gateway)
    failures = Counter[str]()
    for one in drawn:
        rollout = await player.run(one.task)
        failures[one.kind] += outcome(Attempt(one.task, rollout)) != 1.0
        assert len(rollout.ledger.turns) == len(one.calls) + 1
        assert "drift" not in rollout.infos
    assert failures == dict.fromkeys([*KINDS, *TRAILS], 0)


async def test_demonstrations_equal_rollouts(template: Template, gateway: AnyGateway) -> None:
    writer = DemonstrationWriter(template, TOOLS)
    for kind in ("fact", "sum", "hop", "move"):
        one = draw_problem(5, 0, kind)
        engine = saying(writer, {one.task.id: one.turns})
        rollout = await RolloutRunner(engine, template, gateway).run(one.task)
        shown = writer.write(one, Random(0))
        assert shown.ids == rollout.ledger.ids
        assert shown.mask == rollout.ledger.mask


AGENT_KINDS = ("fact", "sum", "hop", "move")


@pytest.mark.parametrize(
    ("name", "arguments", "answer"),
    [
        ("look_up", '{"name": "Oslo"}', "4312"),
        ("calculate", '{"expression": "9264 + 43"}', "9307"),
        ("calculate", '{"expression": "9**9**9"}', "there is no such tool, or its arguments are others"),
        ("calculate", '{"expression": 3}', "there is no such tool, or its arguments are others"),
        ("no_tool", "{}", "there is no such tool, or its arguments are others"),
    ],
)
def test_tools_answer_every_call(name: str, arguments: str, answer: str) -> None:
    assert demo_agent.answer_call({"name": name, "arguments": arguments}, {"Oslo": "4312"}) == answer


def test_tools_are_those_that_the_model_was_shown() -> None:
    shown = [(tool["function"]["name"], [*tool["function"]["parameters"]["properties"]]) for tool in demo_agent.TOOLS]
    assert shown == [(tool.name, [*tool.parameters["properties"]]) for tool in facts_tasks.TOOLS]


@pytest.mark.parametrize("kind", ["fact", "move"])
async def test_policy_that_calls_the_tools_answers_right_and_keeps_its_ids(kind: str) -> None:
    (problem,) = islice(facts_tasks.draw_problems(seed=0, kinds=(kind,)), 1)
    calls = [call_text(call.tool, json.dumps(call.arguments)) for call in problem.calls]
    settings = load_settings(TrainSettings, find_jobs()["agent"], {})
    assert settings.demo.kinds == AGENT_KINDS and settings.agent is not None
    limits = RolloutLimits(timeout_s=30)
    function = settings.agent.function
    async with open_agents([*calls, f"#### {problem.answer}"], function=function, limits=limits) as harness:
        rollout = await harness.run(replace(problem.task, session_task=SessionTask()))
    assert rollout.stop is StopReason.DONE and len(rollout.ledgers) == 1
    results = [str(entry.messages[0]["content"]) for entry in rollout.ledger if entry.author == Author.TOOL]
    assert results == [call.result for call in problem.calls]
    assert rollout.infos["agent"]["changed_by_agent"] == {}
