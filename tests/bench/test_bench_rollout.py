"""Tests that rollouts are measured with every engine, and KL turn by turn; times are not checked."""

from __future__ import annotations

import json
from pathlib import Path

from bench import turn_depth
from tests.bench.run_script import run_script
from trainer.engine.torch.torch_engine import TorchEngine
from trainer.model import load_model
from trainer.policy.policy import Policy
from trainer.policy.settings import UpdateSettings
from trainer.rollout.settings import TemplateSettings
from trainer.setup import load_template


def test_every_engine_is_measured_on_the_same_rollouts_and_every_promise_is_listed(tmp_path: Path) -> None:
    run_script("rollout", "--quick", "--out", tmp_path)
    results = json.loads((tmp_path / "rollout.json").read_text())
    assert list(results["per_s"]) == ["0", "10"]
    for rates in results["per_s"].values():
        assert len(rates) == 4 and all(rate > 0 for rate in rates.values())
    assert 0 < results["cached_of_possible"] <= 1
    assert list(results["in_flight_per_s"]) == ["0", "10"] and list(results["overhead_ms"]) == ["4", "50", "200"]
    text = (tmp_path / "rollout.md").read_text()
    assert text.count("| met |") + text.count("| **missed** |") == 9


async def test_kl_of_each_turn_is_that_of_its_own_tokens(model: Path, one_thread: None) -> None:
    policy, size = Policy.load(model, UpdateSettings()), turn_depth.Size(rollouts=2, turns=3, words=2, turn_tokens=4)
    async with TorchEngine(load_model(model), deterministic=False) as engine:
        rollouts = await turn_depth.play(engine, load_template(model, TemplateSettings()), size, range(1000))
    turns = turn_depth.compare(rollouts, policy.compute_logprobs)
    assert len(turns) == 3 and all(turn["tokens"] == 2 and turn["max"] < 1e-3 for turn in turns)
    shifted = turn_depth.compare(rollouts, lambda ids: [logprob - 1 for logprob in policy.compute_logprobs(ids)])
    assert all(0.9 < turn["max"] < 1.1 for turn in shifted)
    assert turn_depth.format_turns({"embedded": turn_depth.fold(shifted)}).count("|") == 9
