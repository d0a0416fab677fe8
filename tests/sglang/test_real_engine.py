"""The engine on a real server: generation and logprobs equal the trainer's, up to rounding."""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from pathlib import Path

import anyio
import pytest
import torch
from transformers import PreTrainedModel

from bench.expert_replay import Size, measure_replay
from tests.sglang.conftest import OPTIONS, started
from tests.sglang.policy import AGREE, EOS, PROMPT, WAYS, moved, off, opened, way_of
from tests.trainer.policy.tiny_policies import pack_sequences
from trainer.algorithms.settings import ReferenceSettings
from trainer.engine.base import Sampling
from trainer.engine.sglang import server_process
from trainer.engine.sglang.server_process import ServerProcess
from trainer.engine.sglang.weight_sync.base import RoundedBuckets, untied_tensors
from trainer.engine.sglang.weight_sync.load_changes import LOADER
from trainer.engine.sglang.weight_sync.verify import make_probes, server_logprobs
from trainer.policy.logprobs import LogprobReader
from trainer.policy.reference import ServedReference

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.6}, {"top_p": 0.8, "top_k": 20, "temperature": 1.3}])
async def test_logprobs_use_the_temperature_and_ignore_filters(
    server: ServerProcess, policy: PreTrainedModel, sampling: dict[str, float]
) -> None:
    async with opened(server, policy=policy) as engine:
        written = await engine.generate(PROMPT, Sampling(max_tokens=100, **sampling))  # type: ignore[arg-type]
        assert engine.capabilities.is_exact and engine.agreement and engine.agreement.max_difference <= AGREE
    assert written.ids and off(policy, PROMPT, written, sampling.get("temperature", 1.0)) <= AGREE


async def test_stop_ids_end_a_turn_and_banned_ids_are_never_sampled(
    server: ServerProcess, policy: PreTrainedModel
) -> None:
    async with opened(server, policy=policy) as engine:
        free = await engine.generate(PROMPT, Sampling(max_tokens=6, temperature=0, banned_ids=(EOS,)))
        stopped = await engine.generate(PROMPT, Sampling(max_tokens=6, temperature=0, stop_ids=(free.ids[2],)))
        barred = await engine.generate(PROMPT, Sampling(max_tokens=6, temperature=0, banned_ids=(free.ids[0], EOS)))
    first = free.ids.index(free.ids[2])
    assert stopped.finish_reason == "stop" and stopped.ids == free.ids[: first + 1]
    assert free.finish_reason == "length" and free.ids[0] not in barred.ids


@pytest.mark.parametrize("name", WAYS)
async def test_weights_arrive_by_every_transfer_and_can_be_restored(
    name: str, server: ServerProcess, model: Path, policy: PreTrainedModel
) -> None:
    greedy = Sampling(max_tokens=24, temperature=0)
    before = {key: value.clone() for key, value in policy.state_dict().items()}
    async with opened(server, policy=policy, way=way_of(name, model)) as engine:
        first = await engine.generate(PROMPT, greedy)
        moved(policy)
        began = time.perf_counter()
        await engine.publish(policy.state_dict(), 1)
        sys.stderr.write(f"weights published by {name} in {time.perf_counter() - began:.3f} s\n")
        second = await engine.generate(PROMPT, greedy)
        assert off(policy, PROMPT, second) <= AGREE
        policy.load_state_dict(before)
        await engine.publish(policy.state_dict(), 2)
        third = await engine.generate(PROMPT, greedy)
    assert second.ids != first.ids and third.ids == first.ids
    assert (first.version, second.version, third.version) == (0, 1, 2)
    assert third.cached_tokens == 0


async def test_bfloat16_server_is_sent_what_it_would_have_rounded(
    model: Path, policy: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = [value for _, value in untied_tensors(policy.state_dict())]
    rounded = sum(value.nbytes // (2 if value.dim() > 1 else 1) for value in sent)
    async with (
        started(model, tmp_path, replace(OPTIONS, extra=("--dtype", "bfloat16"))) as server,
        opened(server, policy=policy) as engine,
    ):
        assert engine.published_bytes == rounded and engine.agreement is not None
        difference = engine.agreement.max_difference
        monkeypatch.setattr(RoundedBuckets, "_round", lambda _, value: value)
        await engine.publish(policy.state_dict(), 1)
        assert engine.published_bytes == sum(value.nbytes for value in sent)
        assert engine.agreement.max_difference == difference > AGREE


async def test_split_server_computes_with_changed_values_as_with_whole_weights(
    model: Path, policy: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment, (probe,) = server_process.server_environment(), make_probes(None)
    monkeypatch.setattr(server_process, "server_environment", lambda: {**environment, "PYTHONPATH": str(ROOT)})
    extra = ("--dtype", "bfloat16", "--tp", "2", "--custom-weight-loader", LOADER)
    async with started(model, tmp_path, replace(OPTIONS, extra=extra)) as server:
        async with opened(server, policy=policy) as engine:
            whole, before = engine.published_bytes, await server_logprobs(engine.replicas[0].client, probe)
            with torch.no_grad():
                for weight in policy.parameters():
                    weight.view(-1)[::50] += 0.1
            await engine.publish(policy.state_dict(), 1)
            assert 0 < engine.published_bytes < whole / 10
            changed = await server_logprobs(engine.replicas[0].client, probe)
        async with opened(server, policy=policy, way=way_of("disk", model)) as engine:
            assert await server_logprobs(engine.replicas[0].client, probe) == changed != before


async def test_most_likely_tokens_of_a_served_teacher_are_the_models(
    server: ServerProcess, policy: PreTrainedModel
) -> None:
    rows = [[*PROMPT, 7, 9, 11], [*PROMPT, 8]]
    tokens = pack_sequences(rows)
    inputs = tokens._replace(selected_T=(tokens.ids_T < 12) & (tokens.ids_T != 9)), 6
    teacher = ServedReference(ReferenceSettings(url=server.url))
    served = await anyio.to_thread.run_sync(teacher.compute_top_logprobs, *inputs)
    local = LogprobReader(policy, 1024).compute_top_logprobs(*inputs)
    assert (served.logprobs_TK - local.logprobs_TK).abs().max() <= AGREE
    assert (served.ids_TK == local.ids_TK).float().mean() > 0.9  # Equally likely ones may change places.


async def test_training_with_the_experts_that_a_server_tells_is_closer_to_it() -> None:
    found = (await measure_replay(Size(rollouts=8, turns=2)))["replay"]
    assert found["with"]["kl"] < found["without"]["kl"] / 2
