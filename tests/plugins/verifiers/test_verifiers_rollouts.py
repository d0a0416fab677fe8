"""Rollouts in environments of `verifiers`: their own runner calls tools, answers, ends and scores."""

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
from tests.plugins.verifiers.verifiers_runs import make_settings, open_environment, texts_of
from tests.trainer.policy_scripts import render_calls
from trainer.ledger import Author
from trainer.rollout.rollout import Rollout, StopReason
from trainer.rollout.settings import RolloutLimits
from trainer.setup import load_data, make_gateway

PRICE = render_calls(("price", {"item": "apple"}))


async def test_environment_shows_and_calls_its_tools_and_scores_the_group_together() -> None:
    async with open_environment("shop_env") as shop:
        (spec,) = [spec for spec in shop.gateway.specs if spec.audience == "policy"]
        long = await shop.run(PRICE, "It is 6.")
        short = await shop.run("It is 5.", index=1)
        group = await shop.score(long, short)
    assert (spec.name, spec.description) == ("price", "Looks up what one piece of an item costs.")
    assert spec.parameters["required"] == ["item"]
    assert texts_of(long) == [
        ("system", "You sell fruit."),
        ("user", "What do 3 apples cost?"),
        ("assistant", ""),
        ("tool", "2"),
        ("assistant", "It is 6."),
    ]
    assert [entry.author for entry in long.ledger][:4] == [Author.TASK, Author.POLICY, Author.TOOL, Author.POLICY]
    assert (long.stop, short.stop) == (StopReason.STEP_DONE, StopReason.STEP_DONE)
    assert [scored.reward for scored in group.scored] == [1.0, 0.25]


async def test_arguments_and_weights_are_those_of_the_run_file() -> None:
    async with open_environment("shop_env", args={"shortest_weight": 2.0}) as shop:
        group = await shop.score(await shop.run("It is 6."))
    assert [scored.reward for scored in group.scored] == [3.0]


async def test_tool_arguments_come_from_the_state_of_each_rollout() -> None:
    put_pear, put_fig = (render_calls(("put", {"item": item})) for item in ("pear", "fig"))
    async with open_environment("basket_env") as basket:
        rollouts = {}

        async def run(index: int, *turns: str) -> None:
            rollouts[index] = await basket.run(*turns, index=index)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run, 0, put_pear, put_fig, "Done.")
            tasks.start_soon(run, 1, put_fig, "Done.")
        group = await basket.score(rollouts[0], rollouts[1])
    assert [text for role, text in texts_of(rollouts[0]) if role == "tool"] == [
        "in the basket: pear",
        "in the basket: pear, fig",
    ]
    assert [text for role, text in texts_of(rollouts[1]) if role == "tool"] == ["in the basket: fig"]
    assert [scored.reward for scored in group.scored] == [2.0, 1.0]


async def test_environment_answers_turns_without_calls_until_it_is_done() -> None:
    async with open_environment("guess_env") as guess:
        rollout = await guess.run("2", "7", "5")
        group = await guess.score(rollout)
    assert [text for role, text in texts_of(rollout) if role == "user"][1:] == ["It is higher.", "It is lower."]
    assert rollout.stop is StopReason.STEP_DONE
    assert rollout.infos["environment"]["stop"] == "has_final_env_response"
    assert [scored.reward for scored in group.scored] == [pytest.approx(1 / 3)]


async def test_unknown_items_and_malformed_calls_reach_the_environment_as_verifiers_means_it() -> None:
    async with open_environment("shop_env") as shop:
        failing = await shop.run(render_calls(("price", {"item": "fig"})), "I do not know.")
        malformed = await shop.run('<tool_call>\n{"name": price}\n</tool_call>', index=1)
    assert ("tool", "'fig'") in texts_of(failing)
    assert malformed.stop is StopReason.STEP_DONE
    assert malformed.infos["environment"]["stop"] == "no_tools_called"


async def test_rollout_at_a_limit_is_scored_with_the_turns_that_it_has() -> None:
    async with open_environment("guess_env") as guess:
        rollout = await guess.run("2", "7", limits=RolloutLimits(assistant_turns=2, rollout_tokens=100_000))
        group = await guess.score(rollout)
    assert rollout.stop is StopReason.ASSISTANT_TURNS
    assert rollout.infos["environment"]["stop"] == "prompt_too_long"
    assert [scored.reward for scored in group.scored] == [0.5]


async def test_truncated_turn_is_the_last_one_that_the_environment_sees() -> None:
    async with open_environment("shop_env") as shop:
        cut = await shop.run("It is 6.", limits=RolloutLimits(turn_tokens=3, rollout_tokens=100_000))
        group = await shop.score(cut)
    assert cut.stop is StopReason.LENGTH_TURN
    assert [scored.components["environment"] for scored in group.scored] == [0.25]


async def test_metrics_of_the_rubric_can_be_components() -> None:
    from mtrl_plugins.environments.reward import environment_reward
    from trainer.reward.attempt import Attempt

    async with open_environment("shop_env") as shop:
        rollout = await shop.run("It is 6.")
        attempt = Attempt(shop.tasks[0], rollout)
        scores = [await anyio.to_thread.run_sync(environment_reward, [attempt], name) for name in ("correct", "none")]
    assert scores == [[1.0], [None]]


async def test_reasoning_is_given_apart_or_inline() -> None:
    async with open_environment("shop_env", reasoning="inline") as shop:
        rollout = await shop.run("<think>3 times 2</think>It is 6.")
        group = await shop.score(rollout)
    assert [scored.reward for scored in group.scored] == [1.25]


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
