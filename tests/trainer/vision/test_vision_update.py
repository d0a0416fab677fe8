"""Updates of vision models: gradients, memory, and the vision encoder."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForImageTextToText

from tests.trainer.algorithms.reference_loops import step_totals
from tests.trainer.policy.tiny_policies import model_gradient
from tests.trainer.vision.vision_models import loaded, picture
from tests.trainer.vision.vision_rollouts import lesson_of, play
from tests.trainer.vision.vision_sequences import looked
from trainer.algorithms.loss import compute_loss
from trainer.algorithms.packing import Batch, pack
from trainer.algorithms.settings import AlgorithmSettings
from trainer.model import load_model
from trainer.policy.logprobs import LogprobReader
from trainer.policy.memory_parts import count_adapter_parameters, load_meta_model
from trainer.policy.memory_plan import plan_memory, vision_bytes_per_token
from trainer.policy.policy import Policy
from trainer.policy.settings import UpdateSettings
from trainer.policy.update import PolicyUpdater, trained_tokens
from trainer.template import Template
from trainer.train.job import copy_tokenizer_files
from trainer.train.settings import TrainSettings
from trainer.vision.image_processor import ImageProcessor

ONE, TWO = picture(1), picture(2, 24, 16)
GRPO = AlgorithmSettings()
LEARNED = 200
"""Of a tiny vocabulary, ids that rows are made of."""


def policy_of(folder: Path, **settings: object) -> Policy:
    return Policy.load(folder, UpdateSettings.model_validate({"lr": 1e-2, **settings}))


def batch_of(eyes: ImageProcessor) -> Batch:
    rows = [looked(eyes, [ONE, TWO], 0, 1.0), looked(eyes, [ONE], 0, -0.5), looked(eyes, [TWO, TWO], 1, 0.5)]
    return pack(rows)


def gradient_of(folder: Path, batch: Batch, targets_T: Tensor) -> Tensor:
    """Of the loss on what `batch` shows, as if `targets_T` had been written."""
    policy = policy_of(folder)
    read = _aimed(policy.logprob_reader, batch, targets_T)
    compute_loss(read, batch, step_totals(batch), GRPO).value.backward()  # type: ignore[no-untyped-call]
    return model_gradient(policy.model)


def _aimed(reader: LogprobReader, batch: Batch, targets_T: Tensor) -> Tensor:
    hidden = reader.compute_hidden_states(batch.ids_T, batch.sequence_T, batch.images)
    head = reader.model.get_output_embeddings()  # type: ignore[no-untyped-call]
    logprobs_UV = head(hidden.states_UD).float().log_softmax(-1)
    before_T = hidden.node_T.roll(1)
    aimed_T: Tensor = logprobs_UV[before_T, targets_T.clamp(min=0)]
    return aimed_T


def test_tool_and_image_tokens_get_no_gradient(kind: Path) -> None:
    """Whatever stood there as a target, and whatever it was worth, not one bit of the gradient would be another."""
    eyes = ImageProcessor.load(kind)
    assert eyes is not None
    batch = batch_of(eyes)
    noise_T = torch.randn(len(batch.ids_T), generator=torch.Generator().manual_seed(1))
    clean = gradient_of(kind, batch, batch.ids_T)
    others: dict[str, Any] = {
        name: torch.where(batch.mask_T, getattr(batch, name), getattr(batch, name) + noise_T)
        for name in ("engine_logprobs_T", "old_logprobs_T", "advantages_T")
    }
    targets_T = torch.where(batch.mask_T, batch.ids_T, (batch.ids_T.clamp(min=0) + 7) % LEARNED)
    assert int((batch.ids_T < 0).sum()) > 20 and float(clean.abs().max()) > 0
    assert torch.equal(clean, gradient_of(kind, replace(batch, **others), targets_T))
    mine_T = torch.where(batch.mask_T, (batch.ids_T + 7) % LEARNED, batch.ids_T)
    assert not torch.equal(clean, gradient_of(kind, batch, mine_T))


def test_packed_rows_have_the_gradient_of_single_rows(kind: Path) -> None:
    eyes = ImageProcessor.load(kind)
    assert eyes is not None
    batch = batch_of(eyes)
    assert [one.data for one in batch.images] == [ONE.data, TWO.data]
    found: list[Tensor] = []
    for alone in (False, True):
        policy = policy_of(kind)
        if alone:
            policy.logprob_reader.fallback_reason = "as if it could not be packed"
            policy.model.get_submodule("model.language_model").set_attn_implementation("sdpa")  # type: ignore[operator]
        read = policy.logprob_reader.compute_batch_logprobs(trained_tokens(batch, 1.0))
        compute_loss(read.logprobs_T, batch, step_totals(batch), GRPO).value.backward()  # type: ignore[no-untyped-call]
        found.append(model_gradient(policy.model))
    assert torch.allclose(found[0], found[1], atol=1e-5 * float(found[0].abs().max()))


@pytest.mark.parametrize(
    ("settings", "learns"),
    [
        ({}, True),
        ({"freeze_vision": True}, False),
        ({"lora": {"rank": 2}}, False),
        ({"lora": {"rank": 2}, "freeze_vision": False}, True),
        ({"gradient_checkpointing": True}, True),
    ],
)
async def test_vision_encoder_trains_if_configured(
    sees: Path, tmp_path: Path, settings: dict[str, object], learns: bool
) -> None:
    rollouts = await play(sees, [ONE, TWO], n=2)
    policy = policy_of(sees, **settings)
    before = {name: value.clone() for name, value in policy.weights.items()}
    metrics = PolicyUpdater(policy, GRPO, exact=True).train_step(lesson_of(rollouts, GRPO))
    moved = {name for name, value in policy.weights.items() if not torch.equal(value, before[name])}
    assert metrics["mismatch/max"] < 1e-5
    assert any("visual" in name for name in moved) is learns and any("language_model" in name for name in moved)
    policy.save(tmp_path)
    if policy.settings.lora:
        adapters = sum(value.numel() for value in policy.model.parameters() if value.requires_grad)
        assert count_adapter_parameters(load_meta_model(sees), policy.settings) == adapters
    again = policy_of(sees, **settings)
    again.resume(tmp_path)
    assert all(torch.equal(value, policy.weights[name]) for name, value in again.weights.items())
    if "lora" not in settings:
        whole = load_model(tmp_path).state_dict()
        assert all(torch.equal(value, whole[name]) for name, value in policy.weights.items())


def test_encoder_computes_what_it_always_does_without_reading_from_the_device(kind: Path) -> None:
    policy = policy_of(kind)
    assert policy.image_processor is not None
    shown = [policy.image_processor.prepare(picture(1, *sides)) for sides in ((64, 64), (24, 40))]
    pixels, grids = torch.cat([image.pixels for image in shown]), torch.tensor([image.grid for image in shown])
    family = policy.image_processor.family
    encoder: Any = policy.model.get_submodule(family.vision_module)
    features, plain = family.encode(encoder, pixels, grids), encoder(pixels, grid_thw=grids)
    assert torch.equal(features.features_FD, plain.pooler_output)
    others = getattr(plain, "deepstack_features", ())
    assert all(torch.equal(*pair) for pair in zip(features.deepstack, others, strict=True))
    family.encode(encoder.to("meta"), pixels.to("meta"), grids)  # Nothing can be read from there.


def test_memory_plan_estimates_image_activations(kind: Path) -> None:
    policy = policy_of(kind)
    assert policy.image_processor is not None
    shown, kept = policy.image_processor.prepare(picture(1, 64, 64)), dict[int, int]()
    weights = {value.untyped_storage().data_ptr() for value in policy.model.parameters()}

    def pack(value: Tensor) -> Tensor:
        store = value.untyped_storage()
        if store.data_ptr() not in weights:
            kept[store.data_ptr()] = store.nbytes()
        return value

    family = policy.image_processor.family
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
        seen = family.encode(policy.model.get_submodule(family.vision_module), shown.pixels, torch.tensor([shown.grid]))
    estimate = vision_bytes_per_token(policy.model, UpdateSettings()) * shown.token_count
    assert seen.features_FD.requires_grad and 0.6 * estimate < sum(kept.values()) < 1.3 * estimate
    layers, decoder_alone = (UpdateSettings(gradient_checkpointing=value) for value in (True, "feed_forward"))
    assert vision_bytes_per_token(policy.model, layers) * shown.token_count < estimate
    assert vision_bytes_per_token(policy.model, decoder_alone) * shown.token_count == estimate
    assert vision_bytes_per_token(policy.model, UpdateSettings(freeze_vision=True)) == 0
    settings = TrainSettings(model=str(kind), steps=1)
    plan = str(plan_memory(settings, kind))
    assert re.search(r"\(plus 0\.0\d+ MiB in the vision encoder for each image token\)", plan), plan
    assert "in the vision encoder" not in str(
        plan_memory(settings.model_copy(update={"update": UpdateSettings(freeze_vision=True)}), kind)
    )


def test_saved_policy_loads_with_its_image_processor(sees: Path, tmp_path: Path) -> None:
    loaded(sees).save_pretrained(tmp_path)
    copy_tokenizer_files(sees, tmp_path)
    assert AutoModelForImageTextToText.from_pretrained(tmp_path).num_parameters() == loaded(sees).num_parameters()
    template = Template.load(tmp_path)
    assert template.image_processor is not None and template.image_processor.prepare(picture(2, 24, 8)).token_count == 3
