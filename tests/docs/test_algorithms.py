"""docs/algorithms.md: every block does what it says, and its tables are what the code computes."""

from __future__ import annotations

import pytest
import torch

from tests.docs.blocks import ROOT
from tests.docs.conftest import Follow
from tests.docs.tables import read_table
from trainer.algorithms.named_algorithms import ALGORITHMS, whiten

PAGE = ROOT / "docs/algorithms.md"
TOKENS = 10


def test_algorithms_page(follow: Follow) -> None:
    follow("docs/algorithms.md")


def test_page_shows_the_advantages_of_every_algorithm() -> None:
    rows = read_table(PAGE, "advantages")
    rewards_S = torch.tensor([1, 0, 0, 0, 1, 1, 0, 0], dtype=torch.float64)
    group_S = torch.tensor([0] * 4 + [1] * 4)
    assert sorted(name for row in rows for name in row[0].split(", ")) == sorted(ALGORITHMS)
    for names, *shown in rows:
        for name in names.split(", "):
            advantages_S = ALGORITHMS[name].advantages(rewards_S, group_S)
            if ALGORITHMS[name].whiten:
                trained_T = torch.ones(len(rewards_S) * TOKENS, dtype=torch.bool)
                advantages_S = whiten(advantages_S.repeat_interleave(TOKENS), trained_T)[::TOKENS]
            assert [float(cell) for cell in shown] == pytest.approx(advantages_S.tolist(), abs=5e-3)
