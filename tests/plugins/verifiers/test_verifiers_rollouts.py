"""Rollouts in environments of `verifiers`: their own runner calls tools, answers, ends and scores."""

from __future__ import annotations

import anyio
import pytest

from tests.plugins.verifiers.verifiers_runs import open_environment, texts_of
from tests.trainer.policy_scripts import render_calls
from trainer.ledger import Author
from trainer.rollout.rollout import StopReason
from trainer.rollout.settings import RolloutLimits

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
