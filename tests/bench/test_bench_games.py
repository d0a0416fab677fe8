"""Tests that a game is played at random as the policy reads it, and that the tiny model has a token for each move."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from mtrl_plugins.environments.host_process import stop_hosts
from tests.plugins.environments.environment_runs import STAND_IN
from tests.plugins.verifiers.verifiers_runs import add_to_path
from trainer.cli.run_file import load_settings
from trainer.pretrained import load_tokenizer
from trainer.train.settings import TrainSettings

sys.path.append(str(Path(__file__).parents[2] / "bench"))
from games import GAMES, JOBS, build_model, play_at_random


async def test_random_games_are_repeated_by_seed_and_make_no_move_twice_unless_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", add_to_path(STAND_IN))
    changes = ("environment.name=textarena:Guess-v0", f"environment.python={sys.executable}")
    settings = load_settings(TrainSettings, JOBS / "guess.yaml", {}, overrides=changes)
    try:
        chats, same, others, free = [
            await play_at_random(settings, GAMES["guess"].moves, seed, 4, repeats=repeats)
            for seed, repeats in ((0, False), (0, False), (1, False), (0, True))
        ]
    finally:
        stop_hosts()
    assert chats == same != others
    moves = [[message["content"] for message in chat if message["role"] == "assistant"] for chat in chats]
    assert all(len({*each}) == len(each) for each in moves)
    assert all(chat[0]["content"].endswith("[GAME] Up to 20.") and chat[-1]["role"] == "assistant" for chat in chats)
    assert any(len({message["content"] for message in chat[1::2]}) < len(chat) // 2 for chat in free)
    tokenizer = load_tokenizer(build_model(tmp_path / "model", [*chats, *free], GAMES["guess"].pieces, 0))
    assert all(len(tokenizer.encode(move)) == 1 for move in {move for each in moves for move in each})
