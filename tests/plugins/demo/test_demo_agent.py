"""The demo's agent: its two tools, and that the job's tasks are solved by a policy that calls them."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import islice

import pytest

from gateway.types import Task as SessionTask
from mtrl_plugins.agents.demo_agent import TOOLS, answer_call
from mtrl_plugins.demo.facts import facts_tasks
from tests.plugins.agents.agent_harness import call_text, open_agents
from trainer.cli.options import find_jobs
from trainer.cli.run_file import load_settings
from trainer.ledger import Author
from trainer.rollout.rollout import StopReason
from trainer.rollout.settings import RolloutLimits
from trainer.train.settings import TrainSettings

pytestmark = pytest.mark.anyio

KINDS = ("fact", "sum", "hop", "move")


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
    assert answer_call({"name": name, "arguments": arguments}, {"Oslo": "4312"}) == answer


def test_tools_are_those_that_the_model_was_shown() -> None:
    shown = [(tool["function"]["name"], [*tool["function"]["parameters"]["properties"]]) for tool in TOOLS]
    assert shown == [(tool.name, [*tool.parameters["properties"]]) for tool in facts_tasks.TOOLS]


@pytest.mark.parametrize("kind", ["fact", "move"])
async def test_policy_that_calls_the_tools_answers_right_and_keeps_its_ids(kind: str) -> None:
    (problem,) = islice(facts_tasks.draw_problems(seed=0, kinds=(kind,)), 1)
    calls = [call_text(call.tool, json.dumps(call.arguments)) for call in problem.calls]
    settings = load_settings(TrainSettings, find_jobs()["agent"], {})
    assert settings.demo.kinds == KINDS and settings.agent is not None
    limits = RolloutLimits(timeout_s=30)
    function = settings.agent.function
    async with open_agents([*calls, f"#### {problem.answer}"], function=function, limits=limits) as harness:
        rollout = await harness.run(replace(problem.task, session_task=SessionTask()))
    assert rollout.stop is StopReason.DONE and len(rollout.ledgers) == 1
    results = [str(entry.messages[0]["content"]) for entry in rollout.ledger if entry.author == Author.TOOL]
    assert results == [call.result for call in problem.calls]
    assert rollout.infos["agent"]["changed_by_agent"] == {}
