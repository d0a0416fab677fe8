"""docs/rewards.md: every block does what it says, and its tables are those of the code."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.docs.blocks import ROOT
from tests.docs.conftest import Follow
from tests.docs.tables import read_table
from trainer.algorithms.credit import TurnRewards, credit_turns
from trainer.algorithms.settings import AlgorithmSettings

PAGE = ROOT / "docs/rewards.md"


def test_rewards_page(follow: Follow) -> None:
    follow("docs/rewards.md")
    last = json.loads(Path("runs/rewards/metrics.jsonl").read_text().splitlines()[-1])
    assert {"reward/right", "reward/brief", "reward/slow", "reward/spread"} <= last.keys()
    assert last["reward/failed"] == 0


def test_page_shows_what_each_kind_of_credit_gives() -> None:
    turn_rewards = TurnRewards(
        rewards_S=torch.tensor([1.2, 0.2, 0.0], dtype=torch.float64),
        outcomes_S=torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64),
        group_S=torch.zeros(3, dtype=torch.long),
        scores_K=torch.tensor([0.2, 0.0, 0.2, 0.0, 0.0], dtype=torch.float64),
        sequence_K=torch.tensor([0, 0, 1, 1, 2]),
    )
    for kind, *shown in read_table(PAGE, "credit"):
        name, _, discount = kind.partition(", gamma: ")
        credit = {"kind": name, "gamma": float(discount or 1)}
        settings = AlgorithmSettings.model_validate({"name": "dr_grpo", "credit": credit})
        advantages = credit_turns(turn_rewards, settings).tolist()
        assert [float(cell) for cell in shown] == pytest.approx(advantages, abs=5e-4)
