"""Tests that KL by turn is measured where it is, and that a fault which grows with depth shows."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path

import pytest

from mtrl_plugins.demo.facts.facts_demo import build_model
from trainer.engine.base import EXACT_TOLERANCE
from trainer.engine.torch.torch_engine import TorchEngine
from trainer.model import load_model
from trainer.policy.policy import Policy
from trainer.policy.settings import UpdateSettings
from trainer.rollout.settings import TemplateSettings
from trainer.setup import load_template

sys.path.append(str(Path(__file__).parents[2] / "bench"))
from turn_depth import BIN, Size, compare, fold, format_turns, play

SIZE = Size(rollouts=2, turns=7, words=2)


async def test_kl_by_turn_is_rounding_and_shows_a_fault_that_grows_with_depth(tmp_path: Path) -> None:
    folder = build_model(tmp_path / "model")
    policy, template = Policy.load(folder, UpdateSettings()), load_template(folder, TemplateSettings())
    async with TorchEngine(load_model(folder), deterministic=False) as engine:
        rollouts = await play(engine, template, SIZE, range(40, 400, 8))
    turns = compare(rollouts, policy.compute_logprobs)
    written = [[len(entry.ids) for entry in rollout.ledger if entry.logprobs] for rollout in rollouts]
    assert [turn["tokens"] for turn in turns] == [sum(lengths) for lengths in zip_longest(*written, fillvalue=0)]
    assert max(turn["max"] for turn in turns) < EXACT_TOLERANCE

    def drifting(ids: Sequence[int]) -> list[float]:
        return [value + place / 1000 for place, value in enumerate(policy.compute_logprobs(ids))]

    found = compare(rollouts, drifting)
    kls = [turn["kl"] for turn in found]
    assert kls == sorted(kls) and kls[-1] > 4 * kls[0]
    folded = {"sound": fold(turns), "drifting": fold(found)}
    first = sum(turn["kl"] * turn["tokens"] for turn in found[:BIN]) / sum(turn["tokens"] for turn in found[:BIN])
    assert folded["drifting"][0] == pytest.approx(first, rel=0.1)
    assert len(format_turns(folded).splitlines()) == 4
