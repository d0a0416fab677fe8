"""What fails around environments of `verifiers` is refused with a remedy, or costs the rollout and never a score."""

from __future__ import annotations

import json
from typing import Any

import anyio
import pytest

from gateway.errors import ConfigError
from mtrl_plugins.environments.host_process import get_host, stop_hosts
from mtrl_plugins.environments.host_server import Conversation
from mtrl_plugins.environments.settings import EnvironmentSettings
from tests.conftest import Write
from tests.plugins.verifiers.verifiers_runs import make_settings, open_environment
from trainer.rollout.rollout import Rollout, StopReason
from trainer.setup import load_data, make_gateway


async def run_with_trouble(trouble: str, **options: Any) -> Rollout:
    async with open_environment("guess_env", args={"trouble": trouble}, **options) as guess:
        return await guess.run("2", "5")


@pytest.mark.parametrize(
    ("trouble", "reason"),
    [("raise", "InfraError: the database is down"), ("bug", "turn: KeyError: 'a bug'"), ("die", "ended (exit code 3)")],
)
async def test_what_fails_in_the_environment_is_a_failure_of_infrastructure(trouble: str, reason: str) -> None:
    rollout = await run_with_trouble(trouble)
    assert rollout.stop is StopReason.TOOL_FAILED
    assert reason in rollout.reason
    assert "environment" not in rollout.infos


@pytest.mark.parametrize(
    ("environment", "options", "problem", "remedy"),
    [
        ("nowhere", {}, "has no environment 'nowhere'", "put nowhere.py into the folder"),
        ("shop_env", {"python": "/no/such/python"}, "'/no/such/python' cannot be started", "/path/to/venv/bin/python"),
        ("json", {}, "'json' is a taskset, which this release of verifiers does not know", "verifiers>=0.4.0"),
    ],
)
def test_what_cannot_be_opened_is_refused_with_a_remedy(
    environment: str, options: dict[str, Any], problem: str, remedy: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        load_data(make_settings(environment, **options), "environment")
    stop_hosts()
    assert problem in str(raised.value) and remedy in str(raised.value)


def test_python_without_verifiers_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONPATH")
    with pytest.raises(ConfigError, match=r"has no verifiers .*\n.*`environment.python`"):
        load_data(make_settings("shop_env"), "environment")
    stop_hosts()


def test_rows_of_the_environment_are_the_data_and_their_number_may_be_limited() -> None:
    settings = make_settings("shop_env")
    assert settings.data == "environment"
    train, held_out = load_data(settings, "environment"), load_data(settings, "environment:eval")
    assert len(load_data(make_settings("shop_env", rows=1), "environment")) == 1
    with pytest.raises(ConfigError, match="has no split 'test'"):
        load_data(settings, "environment:test")
    stop_hosts()
    assert [(task.id, task.truth) for task in train] == [("train-0", "6"), ("train-1", "8")]
    assert [task.messages[-1]["content"] for task in held_out] == ["What do 2 pears cost?"]


async def test_arguments_are_not_stored_with_rollouts() -> None:
    async with open_environment("guess_env", args={"key": "a secret"}) as guess:
        rollout = await guess.run("5")
    assert "a secret" not in json.dumps(rollout.infos["environment"])


async def test_environment_that_orders_its_rows_anew_is_refused() -> None:
    async with open_environment("shop_env") as shop:
        row = {**shop.tasks[0].columns["environment_row"], "digest": "other"}
        host = get_host(EnvironmentSettings.of(shop.settings))  # type: ignore[arg-type]
        with pytest.raises(Exception, match="row 0 is no longer what it was"):
            await host.request_async("open", **row)


async def test_environment_that_asks_for_two_turns_at_once_is_refused() -> None:
    conversation = Conversation()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(conversation.ask, {})
        await anyio.wait_all_tasks_blocked()
        assert await conversation.ask({}) is None
        assert conversation.problem == "the environment asked for two turns at once; a rollout is one chat"
        conversation.answer(None)


async def test_row_of_a_file_is_no_row_of_the_environment(write: Write) -> None:
    write("rows.jsonl", '{"prompt": "What?", "answer": "7"}\n')
    async with open_environment("shop_env") as shop:
        shop.tasks = load_data(shop.settings, "rows.jsonl")
        rollout = await shop.run("It is 6.")
    assert rollout.stop is StopReason.TOOL_FAILED
    assert "rows.jsonl:1: is not a row of verifiers environment 'shop_env'" in rollout.reason


async def test_environment_may_write_the_chat_anew(write: Write) -> None:
    write("short_env.py", REWRITING)
    async with open_environment("short_env") as short:
        rollout = await short.run("One.", "Two.")
    assert len(rollout.earlier) == 1
    assert [message["content"] for message in rollout.ledger.messages] == ["Only this: One.", "Two."]


async def test_tools_that_differ_by_row_are_refused(write: Write) -> None:
    write("other_env.py", OTHER_TOOLS)
    async with open_environment("other_env") as other:
        rollout = await other.run("A.", row=1)
    assert "offers other tools in this row: price instead of none" in rollout.reason


async def test_gateway_is_not_opened_for_an_environment_that_asks_nothing(write: Write) -> None:
    write("mute_env.py", OTHER_TOOLS.replace("max_turns=3", "max_turns=3, mute=True"))
    settings = make_settings("mute_env")
    with pytest.raises(Exception, match="ended its first rollout"):
        async with make_gateway(settings):
            pass
    stop_hosts()


REWRITING = """
    import verifiers as vf

    class ShortEnv(vf.MultiTurnEnv):
        async def rollout(self, input, client, model, sampling_args=None):
            one = await client.complete(model, input["prompt"], [])
            two = await client.complete(model, [{"role": "user", "content": "Only this: " + one["content"]}], [])
            return {"completion": [two], "stop_condition": "enough", "trajectory": [one, two]}

    def load_environment():
        return ShortEnv(dataset=[{"question": "Say something."}])
"""
OTHER_TOOLS = """
    import verifiers as vf

    def price(item):
        "Looks up."

    class OtherEnv(vf.MultiTurnEnv):
        def __init__(self, mute=False, **more):
            super().__init__(**more)
            self.mute = mute

        async def rollout(self, input, client, model, sampling_args=None):
            tool = {"type": "function", "function": {"name": "price", "description": "", "parameters": {}}}
            if not self.mute:
                await client.complete(model, input["prompt"], [tool] * input["example_id"])
            return {"completion": [], "stop_condition": "mute", "trajectory": []}

    def load_environment():
        return OtherEnv(dataset=[{"question": "One."}, {"question": "Two."}], max_turns=3)
"""
