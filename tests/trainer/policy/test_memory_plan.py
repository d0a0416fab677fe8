"""Tests the memory plan: its parts, its accuracy against a real pass, and its remedies."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.trainer.policy.tiny_policies import pack_sequences, tiny_model
from trainer.algorithms.settings import AlgorithmSettings, KLSettings
from trainer.distributed.settings import DistributedSettings, count_ranks
from trainer.engine.torch import choose_holding
from trainer.engine.torch.kv_cache import KVCache, KVShape
from trainer.policy.memory_parts import MemoryPlan, count_adapter_parameters, load_meta_model
from trainer.policy.memory_plan import free_memory, plan_allocator, plan_memory, plan_update_pass
from trainer.policy.policy import Policy
from trainer.policy.process_memory import measure_floor, resident_memory
from trainer.policy.settings import CriticSettings, LoraSettings, PolicyError, UpdateSettings
from trainer.rollout.settings import RolloutSettings
from trainer.train.settings import TrainSettings

GIB = 1024**3


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


def part_size(plan: MemoryPlan, name: str) -> int:
    return sum(part.size for part in plan.parts if part.name.startswith(name))


def test_weights_gradients_and_optimizer_are_counted(folder: Path) -> None:
    whole = 4 * sum(value.numel() for value in tiny_model().parameters())
    plan = make_plan(folder, kl=0.1, critic=CriticSettings())
    for name, times in {"weights of": 1, "gradients": 1, "optimizer": 2, "reference": 1, "critic": 4}.items():
        assert part_size(plan, name) == times * whole, name
    assert part_size(make_plan(folder, optimizer="muon"), "optimizer") < 2 * whole
    light = make_plan(folder, kl=0.1, lora=LoraSettings(rank=1))
    assert (
        part_size(light, "gradients") == part_size(light, "reference") == 0
        and 0 < part_size(light, "adapters") < 4 * whole
    )
    # Two layers of keys and values, with two heads of eight, for 64 sequences of 4096 tokens.
    assert part_size(plan, "keys and values") == 64 * 4096 * 2 * 2 * 16 * 4


@pytest.mark.parametrize("targets", [(), ("q_proj", "down_proj"), ("layers.1.self_attn.v_proj",), ("embed_tokens",)])
def test_adapters_are_counted_before_they_are_added(folder: Path, targets: tuple[str, ...]) -> None:
    update = UpdateSettings(lr=1e-3, lora=LoraSettings(rank=3, targets=targets))
    real = sum(value.numel() for value in Policy(tiny_model(), update).model.parameters() if value.requires_grad)
    assert 0 < count_adapter_parameters(load_meta_model(folder), update) == real


def test_rollouts_need_only_the_engines_memory(folder: Path) -> None:
    plan = plan_memory(RolloutSettings(model=folder, data="-", out=folder), folder, GIB)
    assert [part.name for part in plan.parts] == [
        "weights of the engine",
        "keys and values",
        "prefixes that are kept",
        "probabilities while sampling",
        "the model that the engine copies",
    ]
    assert plan.fits and plan.remedy == ""


@pytest.mark.parametrize("checkpointing", [False, True])
def test_planned_pass_is_close_to_the_real_one(checkpointing: bool) -> None:
    update = UpdateSettings(checkpointing=checkpointing)
    policy = Policy(tiny_model(), update)
    kept: dict[int, int] = {}
    weights = {value.untyped_storage().data_ptr() for value in policy.model.parameters()}

    def pack(value: Tensor) -> Tensor:
        store = value.untyped_storage()
        if store.data_ptr() not in weights:
            kept[store.data_ptr()] = store.nbytes()
        return value

    ids_T, sequence_T, _ = pack_sequences([[(7 * token + row) % 50 for token in range(40)] for row in range(20)])
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
        hidden = policy.logprob_reader.compute_hidden_states(ids_T, sequence_T)
    planned = plan_update_pass(policy.model, update, len(ids_T))[0].size
    assert hidden.states_UD.requires_grad
    # Recomputed activations exist only in the backward pass.
    minimum = 2 * 4 * 16 * len(ids_T) if checkpointing else 0.7 * planned
    assert minimum <= sum(kept.values()) < 1.3 * planned


@pytest.mark.parametrize(
    ("update", "first"),
    [
        ({"tokens": 10**9}, "lower `update.tokens` or set `update.checkpointing`"),
        ({"tokens": 10**9, "checkpointing": True}, "lower `update.tokens`;"),
        ({}, "lower `admission.writing` or `limits.rollout_tokens`"),
    ],
)
def test_plan_that_does_not_fit_names_remedies(folder: Path, update: dict[str, Any], first: str) -> None:
    plan = make_plan(folder, available=1000, **update)
    assert not plan.fits and plan.remedy.startswith(first)
    with pytest.raises(PolicyError, match=r"does not fit: memory: .*GiB that are free\n  remedy: lower"):
        plan.require()


def test_logits_are_planned_for_no_more_tokens_than_a_pass_has(folder: Path) -> None:
    plan = make_plan(folder, available=1000, tokens=10**7, chunk=10**9)
    assert part_size(plan, "logits of 10000000 tokens") == 4 * 4 * 50 * 10**7
    assert "lower `update.chunk`" in plan.remedy


def test_engine_that_takes_turns_shares_weights_and_frees_its_cache_during_updates(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choose_holding, "MIN_SHARED", 0)
    settings = TrainSettings(engine="torch")
    shared = plan_memory(settings, folder, GIB)
    copied = plan_memory(settings.model_copy(update={"mode": "asynchronous"}), folder, GIB)
    assert part_size(shared, "weights of the engine") == 0 < part_size(copied, "weights of the engine")
    assert "shared with the trainer" in str(shared)
    caches = part_size(shared, "keys and values") + part_size(shared, "prefixes")
    assert shared.needed_during("generating") > caches > 0
    passes = sum(part_size(shared, name) for name in ("a pass", "logits", "what the allocator"))
    trained = part_size(shared, "weights") + part_size(shared, "gradients") + part_size(shared, "optimizer")
    assert shared.needed_during("pass") == trained + passes
    sampling, engine = part_size(copied, "probabilities"), part_size(copied, "weights of the engine")
    assert copied.needed_during("pass") == trained + passes + caches + sampling + engine


def test_an_engine_that_copies_a_model_has_it_twice_while_it_loads(folder: Path) -> None:
    plan = make_plan(folder, lora=LoraSettings())
    whole = part_size(plan, "weights of the engine")
    adapters = part_size(plan, "adapters")
    assert plan.needed_during("loading") == 3 * whole + adapters
    assert 0 < part_size(plan, "merged") < whole, "embeddings are not adapted, so they are not merged"
    assert plan.needed_during("publishing") >= 2 * whole + adapters + part_size(plan, "merged")


def test_optimizer_step_has_two_copies_of_the_largest_weight_and_no_activations(folder: Path) -> None:
    plan = make_plan(folder, tokens=10**6)
    largest = max(value.numel() for value in tiny_model().parameters())
    assert part_size(plan, "copies in the optimizer") == 2 * 4 * largest
    assert plan.peak_phase == "pass" and "at once (pass)" in str(plan)
    passes = sum(part_size(plan, name) for name in ("a pass", "logits", "what the allocator"))
    assert plan.needed_during("optimizer step") == plan.needed - passes + 8 * largest


@pytest.mark.parametrize(("tied", "copies"), [(True, 3), (False, 1)])
def test_end_of_a_pass_has_three_gradients_of_an_embedding_that_is_the_head_too(
    tmp_path: Path, tied: bool, copies: int
) -> None:
    model = tiny_model()
    model.config.tie_word_embeddings = tied
    model.config.save_pretrained(tmp_path)
    embedding = 4 * model.get_input_embeddings().weight.numel()
    plan = make_plan(tmp_path, tokens=1)
    assert part_size(plan, "copies of the embedding's gradient") == copies * embedding
    update = plan.needed_during("optimizer step") - part_size(plan, "copies in the optimizer")
    passes = copies * embedding + part_size(plan, "what the allocator")
    assert plan.needed_during("end of a pass") == update + passes, "activations and logits are freed by then"
    assert part_size(make_plan(tmp_path, lora=LoraSettings()), "copies of the embedding's gradient") == 0


@pytest.mark.parametrize("launcher", [{}, {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}])
def test_ranks_of_any_launcher_share_no_weights_with_the_engine(
    folder: Path, monkeypatch: pytest.MonkeyPatch, launcher: dict[str, str]
) -> None:
    monkeypatch.setattr(choose_holding, "MIN_SHARED", 0)
    for name, value in launcher.items():
        monkeypatch.setenv(name, value)
    settings = TrainSettings.model_validate({"engine": "torch", "distributed": {"ranks": 1 if launcher else 2}})
    ranks = count_ranks(settings.distributed)
    assert ranks == 2 and "shared with the trainer" not in str(plan_memory(settings, folder, GIB, ranks=ranks))
    alone = plan_memory(settings, folder, GIB)
    assert part_size(alone, "weights of the engine") == 0


def test_peak_includes_what_the_process_has_already(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = make_plan(folder)
    assert plan.peak - plan.needed == plan.taken > 2**20
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: "no such numbers")
    assert resident_memory() == 0


@pytest.mark.parametrize("length", [1, 64, 65, 128, 129, 700])
def test_planned_length_of_the_engines_cache_is_that_to_which_it_grows(length: int) -> None:
    cache = KVCache(KVShape(1, 1, 2, torch.float32, torch.device("cpu")), slots=1)
    for position in range(1, length + 1):
        cache.ensure_length(position)
    assert cache.length == KVCache.planned_length(length)


def test_allocator_keeps_freed_tensors_of_the_heap_and_gives_back_large_ones(folder: Path) -> None:
    model = load_meta_model(folder)
    small = plan_allocator(model, UpdateSettings(chunk=2**25), 1000).size
    assert plan_allocator(model, UpdateSettings(chunk=2**25), 2000).size == pytest.approx(2 * small)
    assert (
        plan_allocator(model, UpdateSettings(chunk=1, lora=LoraSettings()), 1000).size
        > 1.5 * plan_allocator(model, UpdateSettings(chunk=1), 1000).size
        > 0
    )
    assert plan_allocator(model, UpdateSettings(chunk=2**25), 2**25).size == 0


def test_allocator_keeps_freed_logits_of_a_small_vocabulary(folder: Path) -> None:
    model = load_meta_model(folder)
    plans = [plan_allocator(model, UpdateSettings(chunk=chunk), 4000).size for chunk in (1000, 2000, 4000, 10**6)]
    assert plans[1] - plans[0] == pytest.approx(1.75 * 4 * 4 * 50 * 1000), "four copies of the logits of a chunk"
    assert plans[3] == plans[2], "a chunk has no more tokens than a pass"
    model.config.vocab_size = 10**6
    assert plan_allocator(model, UpdateSettings(), 4000).size < plans[0], "large logits are given back at once"


def test_floor_is_measured_after_all_that_an_update_uses_was_imported() -> None:
    random = torch.random.get_rng_state()
    assert measure_floor(lora=True) > 2**20 and "peft" in sys.modules
    assert torch.equal(torch.random.get_rng_state(), random), "a run's random numbers do not depend on the plan"


def test_large_model_gets_lora_as_a_remedy(folder: Path) -> None:
    plan = make_plan(folder, available=1000, tokens=1, chunk=1)
    weights_only = MemoryPlan(
        tuple(part for part in plan.parts if part.name in ("weights", "gradients", "optimizer")), 1000
    )
    assert (
        "set `update.lora` (optimizer" in weights_only.remedy and "use a smaller model (weights" in weights_only.remedy
    )


def test_plan_that_fits_has_no_remedy(folder: Path) -> None:
    plan = make_plan(folder, available=100 * GIB)
    plan.require()
    assert plan.fits and "GiB that are free" in str(plan)


def test_folder_without_a_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match="has no causal language model"):
        make_plan(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(PolicyError, match="is a file, not a model's folder"):
        make_plan(tmp_path / "file")
    with pytest.raises(PolicyError, match=r"there is no folder .*\n.*models are not downloaded: `hf download NAME"):
        make_plan(tmp_path / "Qwen/Qwen3-0.6B")


def test_free_memory_is_measured_with_and_without_proc(monkeypatch: pytest.MonkeyPatch) -> None:
    assert free_memory() > 2**20
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: "no such line")
    assert free_memory() > 2**20


def test_offloaded_training_leaves_the_gpu_its_gathered_layers(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    distributed = DistributedSettings(offload=True)
    settings = TrainSettings(model=str(folder), data="-", engine="torch", out=folder, distributed=distributed)
    weights = 4 * sum(value.numel() for value in tiny_model().parameters())
    beside = plan_memory(settings, folder, GIB)
    assert part_size(beside, "optimizer") == 2 * weights, "without a GPU, all is in the host's memory anyway"
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    plan = plan_memory(settings, folder, GIB)
    assert part_size(plan, "optimizer") == part_size(plan, "gradients") == 0
    assert 0 < part_size(plan, "gathered layers") <= weights and "GiB of the host's memory" in str(plan)
