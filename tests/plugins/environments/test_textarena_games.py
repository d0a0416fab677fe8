"""Games of TextArena, with a stand-in of the package: turns are moves, opponents play the other seats."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from threading import Barrier
from typing import Any

import anyio
import pytest
from starlette.responses import Response

from gateway.errors import ConfigError
from mtrl_plugins.environments.host_process import stop_hosts
from tests.plugins.environments.environment_runs import act, make_settings, observations, open_run
from tests.servers.chat_endpoint import completion, serve_chat
from tests.trainer.cli_data import RunCommand
from trainer.rollout.rollout import Rollout, StopReason
from trainer.setup import make_gateway

GUESSES = [f"[{number}]" for number in range(1, 9)]


async def test_each_turn_is_a_move_and_the_policy_reads_what_is_new() -> None:
    async with open_run("textarena:Guess-v0", args={"most": 3}) as game:
        rollout = await game.run("[1]", "[2]", "[3]")
        group = await game.score(rollout)
    first, *later = observations(rollout)
    assert first.endswith("nothing else is read.\n\n[GAME] Up to 3.")
    assert all("Up to 3" not in text for text in later)
    assert later[-1].endswith("\nThe episode is over: it has ended.")
    assert rollout.stop is StopReason.FEEDBACK_DONE
    assert [scored.reward for scored in group.scored] == [rollout.infos["environment"]["return"]]
    assert game.gateway.specs[0].audience == "loop"


async def test_games_that_draw_from_the_global_generator_are_the_same_at_once_and_alone() -> None:
    async def play(index: int) -> None:
        at_once[index] = await game.run(*GUESSES, row=index % 8, index=index)

    at_once: dict[int, Rollout] = {}
    async with open_run("textarena:Guess-v0", args={"most": 8}) as game:
        async with anyio.create_task_group() as tasks:
            for index in range(64):
                tasks.start_soon(play, index)
        alone = [await game.run(*GUESSES, row=row) for row in range(8)]
    texts = [observations(rollout) for rollout in alone]
    assert all(observations(rollout) == texts[index % 8] for index, rollout in at_once.items())
    assert len({json.dumps(each) for each in texts}) > 4


@pytest.mark.parametrize(("opponent", "move"), [(["[4]", "[6]"], 4), ("textarena_opponents:bold", 3), ("random", 2)])
async def test_opponents_play_the_other_seats(opponent: Any, move: int) -> None:
    async with open_run("textarena:Higher-v0", opponent=opponent) as game:
        rollout = await game.run("[1]", "[0]")
    if opponent == "random":  # It picks a move that the game shows, of which one loses.
        assert "That is right." not in observations(rollout)[1]
    else:
        assert f"Player 1 said {move}" in observations(rollout)[1]
        assert rollout.infos["environment"]["return"] == -1.0


async def test_policy_may_have_another_seat_and_opponents_begin() -> None:
    async with open_run("textarena:Higher-v0", opponent=["[3]"], player=1, actions="tool") as game:
        rollout = await game.run(act("[9]"))
    assert "Player 0 said 3" in observations(rollout)[0]
    assert rollout.infos["environment"]["return"] == 1.0  # The opponent says 3 again.


async def test_game_that_ends_before_the_policys_first_turn_is_not_scored() -> None:
    async with open_run("textarena:Higher-v0", opponent=["[0]"], player=1) as game:
        rollout = await game.run("[9]")
    assert rollout.stop is StopReason.TOOL_FAILED
    assert "ended an episode before the policy's first turn (seed 0)" in rollout.reason


async def test_games_wait_for_the_opponents_model_at_the_same_time() -> None:
    async def play(index: int) -> None:
        rollouts.append(await game.run("[1]", "[6]", index=index))

    def answer(count: int, body: Any) -> Response:
        together.wait()
        return completion("[5]" if "Begin" in body["messages"][0]["content"] else "[0]")

    rollouts, together = list[Rollout](), Barrier(4, timeout=60)
    with serve_chat() as endpoint:
        endpoint.respond = answer
        opponent = {"url": endpoint.url, "model": "m"}
        async with open_run("textarena:Higher-v0", opponent=opponent) as game, anyio.create_task_group() as tasks:
            for index in range(4):
                tasks.start_soon(play, index)
    assert ["Player 1 said 5" in observations(rollout)[1] for rollout in rollouts] == [True] * 4


@pytest.mark.parametrize(
    ("name", "options", "problem"),
    [
        ("Chess-v9", {}, "'Chess-v9' cannot be made: Environment Chess-v9 not found"),
        ("Guess-v0", {"player": 1}, "the game has 1 players, so there is no seat 1"),
        ("Guess-v0", {"players": 2}, "'Guess-v0' does not begin with 2 players"),
        ("Guess-v0", {"args": {"most": 0}}, "any number of players up to 15: empty range"),
        ("Higher-v0", {"opponent": "nobody"}, "`opponent` is 'nobody'"),
        ("Higher-v0", {"opponent": "textarena_opponents:shy"}, "textarena_opponents:shy cannot be loaded"),
        ("Higher-v0", {"opponent": {"url": "http://x"}}, "has no url or no model"),
    ],
)
async def test_what_cannot_be_opened_is_refused(name: str, options: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem.replace("[", r"\[")):
        async with make_gateway(make_settings(f"textarena:{name}", **options)):
            pass
    stop_hosts()


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("Modern-v0", "install textarena for Python 3.12 or later"),
        ("Numbers-v0", "-m pip install no_such_numpy"),
        ("Judged-v0", "set OPENROUTER_API_KEY where the run starts"),
    ],
)
@pytest.mark.skipif(sys.version_info >= (3, 12), reason="this Python knows the syntax")
async def test_game_that_needs_more_is_refused_with_what_to_do(name: str, remedy: str) -> None:
    with pytest.raises(ConfigError) as raised:
        async with make_gateway(make_settings(f"textarena:{name}")):
            pass
    stop_hosts()
    assert remedy in str(raised.value)
    if name == "Modern-v0":
        assert "'Modern-v0' needs Python 3.12 or later, and " in str(raised.value)


def test_games_of_a_run_are_learned_with_their_environment_and_evaluated_on_it(run: RunCommand, model: Path) -> None:
    job = {"environment": {"name": "textarena:Guess-v0", "actions": "text", "n_tasks": 4, "n_eval_tasks": 2}}
    Path("run.json").write_text(json.dumps({**job, "limits": {"turn_tokens": 4, "rollout_tokens": 1024}}))
    small = ("steps=1", "prompts=1", "n=2", "template.sanity=ignore_strippable", "evaluation.final_rows=2")
    try:
        run("--config", "run.json", "--model", model, "--out", "runs/played", *small)
        words = ("sft", "--from", "runs/played", "--batch", "1", "--steps", "1", "--out", "runs/learned")
        said = run(*words, "evaluation.final_rows=2", "evaluation.after=true").output
    finally:
        stop_hosts()
    assert "step 1 of 1; loss" in said and "2 held-out tasks" in said
    Path("other.json").write_text(json.dumps({"tools": []}))
    for own in (("tools=[]",), ("--config", "other.json")):  # They take the environment's place.
        said = run("sft", "--from", "runs/played", "--where", "reward > 9", *own, code=2).output
        assert "no rollout where reward > 9" in said and "exclude each other" not in said
