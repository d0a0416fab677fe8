"""TextArena: 200 scripted games, 64 at once, are those that it plays alone."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.environments.real_environments import EPISODES, REFERENCE_S, open_vault, play_all, python_of, run_reference
from tests.plugins.environments.environment_runs import observations, open_run, rewards
from tests.trainer.policy_scripts import render_calls
from trainer.rollout.rollout import Rollout

REFERENCE = Path(__file__).with_name("textarena_reference.py")
TURNS = 12
CUT_OFF = f"\nThe episode is over: it was cut off after {TURNS} steps."
GAMES: dict[str, list[str]] = {
    "GuessTheNumber-v0": [f"[{number}]" for number in range(1, 21)],
    "Mastermind-v0": ["[1 2 3 4]", "[6 5 4 3]", "[2 4 6 1]", "[3 1 5 2]"],
    "Blackjack-v0": ["[Hit]", "[Stand]"],
    "TowerOfHanoi-v0": ["[A C]", "[A B]", "[C B]", "[B C]"],
    "Bandit-v0": ["[red]", "[blue]", "[green]"],
    "LightsOut-v0": ["[0 1]", "[2 2]", "[4 3]"],
    "FrozenLake-v0": ["[down]", "[right]", "[left]", "[up]"],
    "Minesweeper-v0": [f"[{row} {column}]" for row in range(8) for column in range(8)],
    "Secretary-v0": ["[continue]", "[continue]", "[accept]"],
    "TicTacToe-v0": [f"[{cell}]" for cell in range(9)],
    "ConnectFour-v0": [f"[col {column}]" for column in range(7)],
    "Nim-v0": ["[0 1]", "[1 1]", "[2 1]", "[2 2]", "[1 2]"],
    "KuhnPoker-v0": ["[check]", "[bet]", "[call]", "[fold]"],
    "PigDice-v0": ["[roll]", "[hold]"],
    "IteratedPrisonersDilemma-v0": ["I will cooperate.", "[Cooperate]", "[Defect]"],
    "IteratedRockPaperScissors-v0": ["[rock]", "[paper]", "[scissors]"],
    "ColonelBlotto-v0": ["[A10 B5 C5]", "[A4 B8 C8]", "[A20 B0 C0]"],
    "LiarsDice-v0": ["[Bid: 1, 2]", "[Bid: 3, 4]", "[Bid: 5, 6]", "[Call]"],
    "Othello-v0": [f"[{row}, {column}]" for row in range(2, 6) for column in range(2, 6)],
    "ThreePlayerTicTacToe-v0": [f"[{cell}]" for cell in range(25)],
}
"""Games with moves to draw from, for the policy and its opponents; some are against the rules."""


@pytest.mark.parametrize("name", GAMES)
async def test_games_are_those_of_textarena_alone(name: str) -> None:
    draw, count = Random(name), EPISODES // len(GAMES)
    opponent = draw.choices(GAMES[name], k=5)
    scripts = [(seed, draw.choices(GAMES[name], k=TURNS)) for seed in range(count)]
    job = {"name": name, "opponent": opponent, "episodes": scripts}
    expected = await run_reference("textarena", REFERENCE, job=job)
    options = {"python": python_of("textarena"), "opponent": opponent, "n_tasks": count, "max_steps": TURNS}
    async with open_run(f"textarena:{name}", REFERENCE_S, **options) as runs:
        rollouts = await play_all(runs, scripts)
        again = await play_all(runs, scripts[:3])
    ended = [rollout.infos["environment"] for rollout in rollouts]
    assert [info["terminated"] for info in ended] == [game["done"] for game in expected]
    assert [info["return"] for info in ended] == [game["reward"] for game in expected]
    for rollout, game in zip(rollouts, expected, strict=True):
        prompt, *later = observations(rollout)[: len(game["seen"])]
        assert prompt.endswith(game["seen"][0].strip("\n"))
        told = [text.removesuffix(CUT_OFF) for text in later]
        other = [pair for pair in zip(told, game["seen"][1:], strict=True) if not pair[1].strip("\n").endswith(pair[0])]
        assert not other
    assert [observations(rollout) for rollout in again] == [observations(rollout) for rollout in rollouts[:3]]


OPENENV = Path(__file__).with_name("openenv_reference.py")
STEPS = 12
CALLED = {"type": "call_tool", "tool_name": "guess"}


@pytest.mark.parametrize("has_tools", [False, True], ids=["fields", "tools"])
async def test_episodes_are_those_of_openenvs_own_client(has_tools: bool) -> None:
    count = EPISODES // 2
    draw = Random(str(has_tools))
    fields = [
        (seed, [{"number": draw.randint(1, 20), "loudly": draw.random() < 0.5} for _ in range(STEPS)])
        for seed in range(count)
    ]
    if has_tools:
        fields = [(seed, [{"number": guess["number"]} for guess in guesses]) for seed, guesses in fields]
    job = [(seed, [CALLED | {"arguments": one} if has_tools else one for one in each]) for seed, each in fields]
    name = "guess" if has_tools else "step"
    scripts = [(seed, [*(render_calls((name, one)) for one in each), "I stop."]) for seed, each in fields]
    async with open_vault(has_tools=has_tools) as (_, url):
        expected = await run_reference("openenv", OPENENV, url, job=job)
        async with open_run(f"openenv:{url}", REFERENCE_S, n_tasks=count, timeout_s=120) as runs:
            rollouts = await play_all(runs, scripts)
            again = await play_all(runs, scripts[:20])
    assert [rewards(rollout) for rollout in rollouts] == [episode["rewards"] for episode in expected]
    ended = [rollout.infos["environment"]["terminated"] for rollout in rollouts]
    assert ended == [episode["done"] for episode in expected]
    assert 0 < sum(ended) < count
    for rollout, episode in zip(rollouts, expected, strict=True):
        assert hints(rollout) == [hint(observation, has_tools) for observation in episode["observations"][1:]]
    assert [observations(rollout) for rollout in again] == [observations(rollout) for rollout in rollouts[:20]]


def hint(observation: dict[str, Any], has_tools: bool) -> str:
    """What an observation says, as OpenEnv's client has it."""
    if has_tools:
        return str(observation["result"]["data"])
    return f'{{"hint": "{observation["hint"]}", "tries": {observation["tries"]}}}'


def hints(rollout: Rollout) -> list[str]:
    """The same, as the policy read it."""
    return [text.partition("\n")[0] for text in observations(rollout)[1:]]
