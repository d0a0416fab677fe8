"""Tests the memory plan: its parts, its accuracy against a real pass, and its remedies."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor

from tests.trainer.distributed.expert_models import save_expert_model
from tests.trainer.policy.tiny_policies import pack_sequences, tiny_model
from trainer.algorithms.settings import AlgorithmSettings, KLSettings
from trainer.distributed.settings import DistributedSettings
from trainer.engine.torch.kv_cache import KVCache, KVShape
from trainer.engine.torch.paged_kv_cache import PagedKVCache, wanted_pages
from trainer.policy.logprobs import decoder_layers_of
from trainer.policy.memory_parts import MemoryPlan, load_meta_model
from trainer.policy.memory_plan import plan_allocator, plan_memory, plan_training, plan_update_pass
from trainer.policy.policy import Policy
from trainer.policy.settings import Checkpointing, CriticSettings, LoraSettings, UpdateSettings
from trainer.policy.update import PassProgress
from trainer.rollout.settings import RolloutSettings
from trainer.train.settings import TrainSettings

GIB = 1024**3
FEWER = "lower `update.micro_batch_tokens`"


class TrainingSettings(RolloutSettings):
    update: UpdateSettings = UpdateSettings()
    algorithm: AlgorithmSettings = AlgorithmSettings()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny_model().save_pretrained(tmp_path)
    return tmp_path


def make_plan(folder: Path, available: int = GIB, kl: float = 0.0, **update: Any) -> MemoryPlan:
    algorithm = AlgorithmSettings(kl=KLSettings(coefficient=kl))
    settings = TrainingSettings(
        model=folder, data="-", out=folder, update=UpdateSettings(**update), algorithm=algorithm
    )
    return plan_memory(settings, folder, available)


def use_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("is_available", "is_bf16_supported"):
        monkeypatch.setattr(torch.cuda, name, lambda: True)


def part_size(plan: MemoryPlan, name: str) -> int:
    return sum(part.size for part in plan.parts if part.name.startswith(name))


def test_weights_gradients_and_optimizer_are_counted(folder: Path) -> None:
    whole = 4 * sum(value.numel() for value in tiny_model().parameters())
    plan = make_plan(folder, kl=0.1, critic=CriticSettings())
    for name, times in {"weights of": 1, "gradients": 1, "optimizer": 2, "reference": 1, "critic": 4}.items():
        assert part_size(plan, name) == times * whole, name
    light = make_plan(folder, kl=0.1, lora=LoraSettings(rank=1))
    assert (
        part_size(light, "gradients") == part_size(light, "reference") == 0
        and 0 < part_size(light, "adapters") < 4 * whole
    )
    teacher = AlgorithmSettings.model_validate({"kl": {"reference": {"model": str(folder)}}})
    served = AlgorithmSettings.model_validate({"kl": {"reference": {"url": "http://teacher"}}})
    for algorithm, size in ((teacher, whole), (served, 0)):
        parts = list(plan_training(tiny_model(), UpdateSettings(lora=LoraSettings(rank=1)), algorithm))
        assert sum(part.size for part in parts if part.name in ("teacher", "reference")) == size
    # Two layers of keys and values, with two heads of eight, for 64 sequences of 4096 tokens.
    assert part_size(plan, "keys and values") == 64 * 4096 * 2 * 2 * 16 * 4


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_training_is_planned_with_what_the_policy_holds(folder: Path, dtype: str) -> None:
    policy = Policy(tiny_model(), UpdateSettings(dtype=dtype))
    held = sum(value.numel() * value.element_size() for value in policy.model.parameters())
    held += sum(value.numel() * value.element_size() for value in policy._masters._masters.values())
    plan = make_plan(folder, kl=0.1, dtype=dtype)
    assert part_size(plan, "weights") - part_size(plan, "weights of") == held
    numbers = sum(value.numel() for value in policy.model.parameters())
    width = getattr(torch, dtype).itemsize
    assert part_size(plan, "reference") == width * numbers and part_size(plan, "gradients") == 4 * numbers
    adapted = make_plan(folder, dtype=dtype, lora=LoraSettings(rank=1))
    assert part_size(adapted, "weights") - part_size(adapted, "weights of") == width * numbers


def measure_pass(policy: Policy) -> tuple[int, int]:
    """The bytes that a forward pass keeps for the backward pass, and its tokens."""
    kept: dict[int, int] = {}
    weights = {value.untyped_storage().data_ptr() for value in policy.model.parameters()}

    def pack(value: Tensor) -> Tensor:
        store = value.untyped_storage()
        if store.data_ptr() not in weights:
            kept[store.data_ptr()] = store.nbytes()
        return value

    ids_T, sequence_T, *_ = pack_sequences([[(7 * token + row) % 50 for token in range(40)] for row in range(20)])
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
        hidden = policy.logprob_reader.compute_hidden_states(ids_T, sequence_T)
    assert hidden.states_UD.requires_grad
    hidden.states_UD.sum().backward()  # type: ignore[no-untyped-call]
    return sum(kept.values()), len(ids_T)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("checkpointing", [False, "feed_forward", True])
def test_planned_pass_is_close_to_the_real_one(checkpointing: Checkpointing, dtype: str) -> None:
    update = UpdateSettings(gradient_checkpointing=checkpointing, dtype=dtype, micro_batch_tokens=1)
    policy = Policy(tiny_model(), update)
    kept, tokens = measure_pass(policy)
    planned = plan_update_pass(policy.model, update, tokens)[0].size
    width = getattr(torch, dtype).itemsize
    # Recomputed activations exist only in the backward pass.
    recomputed = 4 * 32 * width * tokens if checkpointing == "feed_forward" else 0
    minimum = 2 * width * 16 * tokens if checkpointing is True else 0.7 * (planned - recomputed)
    assert minimum <= kept < 1.3 * (planned - recomputed)


def test_layers_are_computed_again_as_a_whole_or_only_their_feed_forward_parts() -> None:
    kept, halves = dict[Checkpointing, int](), list[float]()
    choices: dict[Checkpointing, dict[str, int]] = {
        False: {"attention": 2, "feed-forward": 2},
        "feed_forward": {"attention": 2, "feed-forward": 4},
        True: {"attention": 4, "feed-forward": 4},
    }
    for checkpointing, expected in choices.items():
        policy, calls = Policy(tiny_model(), UpdateSettings(gradient_checkpointing=checkpointing)), Counter[str]()
        for layer in decoder_layers_of(policy.model):
            layer.self_attn.register_forward_hook(lambda *_, calls=calls: calls.update(["attention"]))
            layer.mlp.act_fn.register_forward_hook(lambda *_, calls=calls: calls.update(["feed-forward"]))
        progress = PassProgress(policy.model, checkpointing=checkpointing)
        with progress.follow(lambda _, progress=progress: halves.append(progress.share)):
            kept[checkpointing], _ = measure_pass(policy)
        assert calls == expected, checkpointing
    assert kept[True] < kept["feed_forward"] < kept[False]
    # The share of the pass after two layers; each choice leaves more of it to do.
    assert halves[1] > halves[5] > halves[9], halves


def test_ranks_that_share_rows_have_a_part_of_a_pass_each_and_rounded_experts_count(tmp_path: Path) -> None:
    model = save_expert_model(tmp_path, "qwen3_moe")
    experts = sum(value.numel() for name, value in model.named_parameters() if ".experts." in name)

    def plan(**distributed: Any) -> MemoryPlan:
        ranks, update = DistributedSettings(**distributed), UpdateSettings(dtype="bfloat16", micro_batch_tokens=10000)
        options: dict[str, Any] = {"engine": "torch", "out": tmp_path, "update": update, "distributed": ranks}
        return plan_memory(TrainSettings(model=str(tmp_path), data="-", **options), tmp_path, GIB)

    assert part_size(plan(), "a pass over") == 2 * part_size(plan(context_parallel=2), "a pass over") > 0
    assert part_size(plan(expert_parallel=True), "rounded experts") == 2 * experts
    assert part_size(plan(), "rounded experts") == part_size(plan(), "tokens sent") == 0
    # Sent and received, both ways, by each of two layers, for two experts a token.
    assert part_size(plan(expert_parallel=True), "tokens sent") == 4 * 2 * 2 * 2 * 16 * 10000
    assert "equally many" in str(plan(expert_parallel=True))


@pytest.mark.parametrize(
    ("update", "first"),
    [
        ({"micro_batch_tokens": 10**9}, f"{FEWER} or set `update.gradient_checkpointing` to `feed_forward` or `true`;"),
        (
            {"micro_batch_tokens": 10**9, "gradient_checkpointing": "feed_forward"},
            f"{FEWER} or set `update.gradient_checkpointing` to `true`;",
        ),
        ({"micro_batch_tokens": 10**9, "gradient_checkpointing": True}, f"{FEWER};"),
        ({}, "lower `concurrency.running_requests` or `limits.rollout_tokens`"),
    ],
)
def test_plan_that_does_not_fit_names_remedies(folder: Path, update: dict[str, Any], first: str) -> None:
    plan = make_plan(folder, available=1000, **update)
    assert not plan.fits and plan.remedy.startswith(first)
    assert str(plan).startswith("memory: ") and str(plan).endswith("GiB that are free")


@pytest.mark.parametrize("length", [1, 64, 65, 128, 129, 700])
def test_planned_length_of_the_engines_cache_is_that_to_which_it_grows(length: int) -> None:
    cache = KVCache(KVShape(1, 1, 2, torch.float32, torch.device("cpu")), slots=1)
    for position in range(1, length + 1):
        cache.ensure_length(position, 1)
    assert cache.length == KVCache.planned_length(length)


def test_engine_on_cuda_is_planned_with_the_pages_that_it_takes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_cuda(monkeypatch)
    settings = TrainingSettings(model=folder, data="-", out=folder, engine="torch")
    plan = plan_memory(settings, folder, GIB)
    shape = KVShape(2, 2, 8, torch.bfloat16, torch.device("cpu"))
    cache = PagedKVCache(shape, 64, wanted_pages(64, settings.limits.rollout_tokens))
    assert part_size(plan, "keys and values") == pytest.approx(cache.values.nbytes, rel=0.01)
    assert part_size(plan, "weights of") == 2 * sum(value.numel() for value in tiny_model().parameters())


def test_engine_on_cuda_that_computes_step_by_step_is_planned_with_the_cache_that_grows(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_cuda(monkeypatch)
    options: dict[str, Any] = {"model": folder, "data": "-", "out": folder, "engine": "torch", "deterministic": True}
    plan = plan_memory(TrainingSettings(**options, limits={"rollout_tokens": 700}), folder, GIB)
    cache = KVCache(KVShape(2, 2, 8, torch.float32, torch.device("cpu")), slots=64)
    for length in range(1, 701):
        cache.ensure_length(length, 64)
    assert part_size(plan, "keys and values") == cache.values.nbytes


def test_cuda_graphs_keep_the_memory_of_sampling_beside_updates(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_cuda(monkeypatch)

    def during(phase: Any, **options: Any) -> int:
        settings = TrainSettings(model=str(folder), data="-", engine="torch", out=folder, **options)
        parts = plan_memory(settings, folder, GIB).parts
        return sum(part.size for part in parts if part.name.startswith("probabilities") and phase in part.during)

    assert during("pass") == during("generating") > 0
    assert during("generating", sampling={"top_p": 0.9}) > 2 * during("generating") > 0
    assert during("pass", deterministic=True) == 0, "without graphs, memory is free again"


def test_engines_cache_takes_memory_only_for_slots_in_use() -> None:
    cache = KVCache(KVShape(1, 8, 64, torch.float32, torch.device("cpu")), slots=64)
    before = psutil.Process().memory_info().rss
    for length in (1024, 4096):
        cache.ensure_length(length, 1)
        cache.write(0, 0, torch.ones(1, 2, 8, length, 64))
    taken = psutil.Process().memory_info().rss - before
    assert cache.values.nbytes == 2**30 and taken < 2**28


def test_allocator_keeps_freed_tensors_of_the_heap_and_gives_back_large_ones(folder: Path) -> None:
    model = load_meta_model(folder)
    small = plan_allocator(model, UpdateSettings(logits_chunk=2**25), 1000).size
    assert plan_allocator(model, UpdateSettings(logits_chunk=2**25), 2000).size == pytest.approx(2 * small)
    assert (
        plan_allocator(model, UpdateSettings(logits_chunk=1, lora=LoraSettings()), 1000).size
        > 1.5 * plan_allocator(model, UpdateSettings(logits_chunk=1), 1000).size
        > 0
    )
    assert plan_allocator(model, UpdateSettings(logits_chunk=2**25), 2**25).size == 0


def test_offloaded_training_leaves_the_gpu_its_gathered_layers(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    distributed = DistributedSettings(offload=True)
    settings = TrainSettings(model=str(folder), data="-", engine="torch", out=folder, distributed=distributed)
    weights = 4 * sum(value.numel() for value in tiny_model().parameters())
    beside = plan_memory(settings, folder, GIB)
    assert part_size(beside, "optimizer") == 2 * weights, "without a GPU, all is in the host's memory anyway"
    use_cuda(monkeypatch)
    plan = plan_memory(settings, folder, GIB)
    assert part_size(plan, "optimizer") == part_size(plan, "gradients") == 0
    assert 0 < part_size(plan, "gathered layers") <= weights // 2 and "GiB of the host's memory" in str(plan)
