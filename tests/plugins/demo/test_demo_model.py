"""The demo's model: tokenizer, template, deterministic creation and first training steps."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from random import Random

import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

from mtrl_plugins.demo import warm_start
from mtrl_plugins.demo.facts.facts_demo import build_model, build_warm_start
from mtrl_plugins.demo.model_cache import find_or_build_model, recipe_digest
from mtrl_plugins.demo.warm_start import MuonWithAdamW, Recipe
from trainer.model import load_model
from trainer.policy.policy import Policy
from trainer.policy.settings import UpdateSettings
from trainer.policy.update import PolicyUpdater
from trainer.template import Template, probe

SHORT = Recipe(skill_steps=12, habit_steps=2, batch_size=4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_model(tmp_path_factory.mktemp("demo"))


def test_template_passes_the_probe_and_its_parser_is_chosen(folder: Path) -> None:
    template = Template.load(folder)
    assert probe(template).is_ok
    assert template.parser.name == "hermes"


def test_demo_model_is_built_once_and_deterministically(tmp_path: Path, one_thread: None) -> None:
    heard: list[tuple[int, int]] = []
    first = find_or_build_model(SHORT, tmp_path / "one", lambda step, of, loss: heard.append((step, of)))
    again = find_or_build_model(SHORT, tmp_path / "one", lambda step, of, loss: heard.append((-step, of)))
    assert first == again
    assert heard == [(step, 14) for step in range(1, 15)]
    other = find_or_build_model(SHORT, tmp_path / "two")
    mine, theirs = load_model(first).state_dict(), load_model(other).state_dict()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    assert recipe_digest(SHORT) != recipe_digest(Recipe())
    assert [one.name for one in (tmp_path / "one").iterdir()] == [first.name]


@pytest.fixture
def model(tmp_path: Path) -> PreTrainedModel:
    return load_model(build_model(tmp_path))


def test_rates_rise_stay_and_fall_as_the_recipe_says(
    model: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rates: list[list[float]] = []

    class Watched(MuonWithAdamW):
        def step(self, closure: None = None) -> None:  # type: ignore[override]
            rates.append([group["lr"] for part in self._parts for group in part.param_groups])
            super().step()

    monkeypatch.setattr(warm_start, "MuonWithAdamW", Watched)
    recipe = Recipe(skill_steps=10, habit_steps=0, warmup_steps=2, batch_size=2)
    warm_start.warm_start(model, build_warm_start(tmp_path), recipe)
    factors = [0.5, 1, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25]
    assert rates == [pytest.approx([0.02 * factor, 3e-3 * factor]) for factor in factors]


def test_matrices_within_layers_are_changed_by_muon_and_all_other_weights_by_adamw(model: PreTrainedModel) -> None:
    other = copy.deepcopy(model)
    make_optimizer = partial(MuonWithAdamW, muon_lr=0.02)
    policy = Policy(model, UpdateSettings(lr=3e-3, max_grad_norm=1e9), make_optimizer=make_optimizer)
    weights = dict(other.named_parameters())
    matrices = [weights.pop(name) for name in [*weights] if ".layers." in name and weights[name].ndim == 2]
    assert len(matrices) == 14
    muon = torch.optim.Muon(matrices, lr=0.02, weight_decay=0.0)
    adamw = torch.optim.AdamW(weights.values(), lr=3e-3, betas=(0.9, 0.98), weight_decay=0.0)
    pairs = [*zip(model.parameters(), other.parameters(), copy.deepcopy(model).parameters(), strict=True)]
    for _ in range(2):
        for weight, expected, _ in pairs:
            weight.grad = torch.randn_like(weight)
            expected.grad = weight.grad.clone()
        for optimizer in (policy, muon, adamw):
            optimizer.step()
    for weight, expected, before in pairs:
        is_rounded = any(expected is matrix for matrix in matrices)  # torch's Muon computes in bfloat16.
        assert (weight - expected).norm() < (0.02 if is_rounded else 1e-5) * (expected - before).norm()


def test_loss_is_the_mean_cross_entropy_of_what_the_policy_wrote(model: PreTrainedModel, tmp_path: Path) -> None:
    setup, draw = build_warm_start(tmp_path), Random(0)
    problems = setup.problems("0", Recipe().kinds)
    ledgers = [setup.writer.write(next(problems), draw) for _ in range(8)]
    losses = []
    for ledger in ledgers:
        ids, written = torch.tensor([ledger.ids]), torch.tensor(ledger.mask)[1:]
        losses.append(cross_entropy(model(ids).logits[0, :-1][written], ids[0, 1:][written], reduction="none"))
    updater = PolicyUpdater(Policy(model, UpdateSettings(lr=1e-3)), warm_start.SFT, exact=True, deterministic=True)
    loss = updater.train_step(warm_start.build_batch(ledgers))["loss"]
    assert loss == pytest.approx(torch.cat(losses).mean().item(), rel=1e-5)
