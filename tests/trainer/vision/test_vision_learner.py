"""The gradient comes from what the policy wrote and from nothing else, and what is saved sees as what was learned."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.trainer.policy.made import gradient
from tests.trainer.vision.played import lesson_of, play
from tests.trainer.vision.rows import looked
from tests.trainer.vision.seeing import picture
from trainer.learn.aggregate import Totals
from trainer.learn.batch import Batch, pack
from trainer.learn.loss import loss
from trainer.learn.settings import AlgorithmSettings, CreditSettings
from trainer.model import load_model
from trainer.policy.errors import PolicyError
from trainer.policy.learner import Learner
from trainer.policy.memory import looking, plan, shapes
from trainer.policy.policy import Policy
from trainer.policy.reader import Reader
from trainer.policy.settings import UpdateSettings
from trainer.train.settings import TrainSettings
from trainer.vision.eyes import Eyes

ONE, TWO = picture(1), picture(2, 24, 16)
GRPO = AlgorithmSettings()
LEARNED = 200
"""Of a tiny vocabulary, ids that rows are made of."""


def policy_of(folder: Path, **settings: object) -> Policy:
    return Policy.load(folder, UpdateSettings.model_validate({"lr": 1e-2, **settings}))


def batch_of(eyes: Eyes) -> Batch:
    rows = [looked(eyes, [ONE, TWO], 0, 1.0), looked(eyes, [ONE], 0, -0.5), looked(eyes, [TWO, TWO], 1, 0.5)]
    return pack(rows)


def gradient_of(folder: Path, batch: Batch, targets_T: Tensor) -> Tensor:
    """Of the loss on what `batch` shows, as if `targets_T` had been written."""
    policy = policy_of(folder)
    read = _aimed(policy.reader, batch, targets_T)
    loss(read, batch, Totals.of([batch]), GRPO).value.backward()  # type: ignore[no-untyped-call]
    return gradient(policy.model)


def _aimed(reader: Reader, batch: Batch, targets_T: Tensor) -> Tensor:
    hidden = reader.hidden(batch.ids_T, batch.sequence_T, batch.images)
    head = reader.model.get_output_embeddings()  # type: ignore[no-untyped-call]
    logprobs_UV = head(hidden.values_UD).float().log_softmax(-1)
    before_T = hidden.at_T.roll(1)
    aimed_T: Tensor = logprobs_UV[before_T, targets_T.clamp(min=0)]
    return aimed_T


def test_tokens_of_tools_and_pictures_receive_no_gradient(kind: Path) -> None:
    """Whatever stood there as a target, and whatever it was worth, not one bit of the gradient would be another."""
    eyes = Eyes.load(kind)
    assert eyes is not None
    batch = batch_of(eyes)
    noise_T = torch.randn(len(batch.ids_T), generator=torch.Generator().manual_seed(1))
    clean = gradient_of(kind, batch, batch.ids_T)
    others: dict[str, Any] = {
        name: torch.where(batch.mask_T, getattr(batch, name), getattr(batch, name) + noise_T)
        for name in ("engine_T", "old_T", "advantages_T")
    }
    targets_T = torch.where(batch.mask_T, batch.ids_T, (batch.ids_T.clamp(min=0) + 7) % LEARNED)
    assert int((batch.ids_T < 0).sum()) > 20 and float(clean.abs().max()) > 0
    assert torch.equal(clean, gradient_of(kind, replace(batch, **others), targets_T))
    mine_T = torch.where(batch.mask_T, (batch.ids_T + 7) % LEARNED, batch.ids_T)
    assert not torch.equal(clean, gradient_of(kind, batch, mine_T))


def test_packed_rows_have_the_gradient_that_they_have_alone(kind: Path) -> None:
    eyes = Eyes.load(kind)
    assert eyes is not None
    batch = batch_of(eyes)
    found: list[Tensor] = []
    for alone in (False, True):
        policy = policy_of(kind)
        if alone:
            policy.reader.note = "as if it could not be packed"
            policy.model.get_submodule(eyes.family.words).set_attn_implementation("sdpa")  # type: ignore[operator]
        read = policy.read(batch.ids_T, batch.sequence_T, batch.trained_T, images=batch.images)
        loss(read.logprobs_T, batch, Totals.of([batch]), GRPO).value.backward()  # type: ignore[no-untyped-call]
        found.append(gradient(policy.model))
    assert torch.allclose(found[0], found[1], atol=1e-5 * float(found[0].abs().max()))


@pytest.mark.parametrize(
    ("settings", "learns"),
    [
        ({}, True),
        ({"vision": "frozen"}, False),
        ({"lora": {"rank": 2}}, False),
        ({"lora": {"rank": 2}, "vision": "trained"}, True),
        ({"optimizer": "muon"}, True),
        ({"checkpointing": True}, True),
    ],
)
async def test_the_eyes_learn_where_the_settings_say_so(
    sees: Path, tmp_path: Path, settings: dict[str, object], learns: bool
) -> None:
    rollouts = await play(sees, [ONE, TWO], n=2)
    policy = policy_of(sees, **settings)
    before = {name: value.clone() for name, value in policy.weights.items()}
    told = Learner(policy, GRPO, exact=True).learn(lesson_of(rollouts, GRPO))
    moved = {name for name, value in policy.weights.items() if not torch.equal(value, before[name])}
    assert told["mismatch/max"] < 1e-5
    assert any("visual" in name for name in moved) is learns and any("language_model" in name for name in moved)
    policy.save(tmp_path)
    again = policy_of(sees, **settings)
    again.resume(tmp_path)
    assert all(torch.equal(value, policy.weights[name]) for name, value in again.weights.items())
    if "lora" not in settings:
        whole = load_model(tmp_path).state_dict()
        assert all(torch.equal(value, whole[name]) for name, value in policy.weights.items())


async def test_a_reference_and_a_critic_look_at_pictures_too(sees: Path) -> None:
    algorithm = AlgorithmSettings.model_validate({"kl": {"coefficient": 0.1}, "credit": CreditSettings(kind="gae")})
    given = lesson_of(await play(sees, [ONE, TWO], n=2), algorithm)
    policy = policy_of(sees, critic={})
    learner = Learner(policy, algorithm, exact=True)
    first, second = learner.learn(given), learner.learn(given)
    assert abs(first["kl/reference"]) < 1e-6 < second["kl/reference"]
    assert second["critic/loss"] < first["critic/loss"]


def test_a_policy_without_eyes_says_so(sees: Path) -> None:
    eyes = Eyes.load(sees)
    assert eyes is not None
    policy = Policy(load_model(sees), UpdateSettings())
    batch = batch_of(eyes)
    with pytest.raises(PolicyError, match="no eyes to see them"):
        policy.read(batch.ids_T, batch.sequence_T, batch.trained_T, images=batch.images)


def test_what_a_model_that_sees_needs_is_counted(kind: Path) -> None:
    settings = TrainSettings(model=str(kind), steps=1)
    numbers = sum(parameter.numel() for parameter in load_model(kind).parameters())
    assert sum(parameter.numel() for parameter in shapes(kind).parameters()) == numbers
    assert plan(settings, kind).parts[0].size == 4 * numbers


def test_what_eyes_keep_for_a_picture_is_told_near_enough(kind: Path) -> None:
    policy = policy_of(kind)
    assert policy.eyes is not None
    shown, kept = policy.eyes.look(picture(1, 64, 64)), dict[int, int]()
    weights = {value.untyped_storage().data_ptr() for value in policy.model.parameters()}

    def pack(value: Tensor) -> Tensor:
        store = value.untyped_storage()
        if store.data_ptr() not in weights:
            kept[store.data_ptr()] = store.nbytes()
        return value

    family = policy.eyes.family
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
        seen = family.see(policy.model.get_submodule(family.eyes), shown.pixels, torch.tensor([shown.grid]))
    told = looking(policy.model, UpdateSettings()) * shown.width
    assert seen.rows_FD.requires_grad and 0.6 * told < sum(kept.values()) < 1.3 * told
    assert looking(policy.model, UpdateSettings(checkpointing=True)) * shown.width < told
    assert looking(policy.model, UpdateSettings(vision="frozen")) == 0
    settings = TrainSettings(model=str(kind), steps=1)
    assert "for each that stands for a picture, 0.0" in str(plan(settings, kind))
    assert "in the eyes" not in str(plan(settings.model_copy(update={"update": UpdateSettings(vision="frozen")}), kind))
