"""The engine on a real server: generation and logprobs equal the trainer's, up to rounding."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import anyio
import pytest
from transformers import PreTrainedModel

from tests.sglang.conftest import OPTIONS, started
from tests.sglang.policy import AGREE, EOS, PROMPT, WAYS, moved, off, opened, way_of, written_on
from tests.trainer.policy.tiny_policies import pack_sequences
from trainer.algorithms.settings import ReferenceSettings
from trainer.engine.base import EngineError, Sampling
from trainer.engine.sglang.server_process import ServerProcess
from trainer.engine.sglang.sglang_engine import SGLangEngine
from trainer.engine.sglang.weight_sync.base import RoundedBuckets, untied_tensors
from trainer.policy.logprobs import LogprobReader
from trainer.policy.reference import ServedReference

ROUNDED = 3e-5
"""Between two programs in float32: each is off what is exact by half of it, in the least likely tokens."""
ROOT = Path(__file__).parents[2]
SMALL = {
    "prompts": 8,
    "n": 8,
    "evaluation": {"every": 1, "rows": 4, "final_rows": 8},
    "checkpoint": {"every": 1},
    "update": {"lr": 0.002},
}


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


async def test_weights_that_differ_from_the_trainers_end_the_run(
    server: ServerProcess, policy: PreTrainedModel
) -> None:
    async with opened(server, policy=policy) as engine:
        other = {name: value.clone() for name, value in policy.state_dict().items()}
        moved(policy)
        with pytest.raises(EngineError, match="has other weights than were published"):
            await engine.publish(other, 1)


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


async def test_closed_connection_frees_its_slot(server: ServerProcess, policy: PreTrainedModel) -> None:
    async with opened(server, policy=policy) as engine:
        async with anyio.create_task_group() as tasks:
            one = Sampling(max_tokens=440, temperature=0, banned_ids=(EOS,))  # Of one request: nothing is taken back.
            tasks.start_soon(partial(engine.generate, PROMPT, one, key="left"))
            await written_on(engine, 1)
            assert await running(engine) == 1
            tasks.cancel_scope.cancel()
        with anyio.fail_after(300):
            while await running(engine):  # noqa: ASYNC110 - it happens at the server
                await anyio.sleep(0.05)


async def running(engine: SGLangEngine) -> int:
    (load,) = (await engine.replicas[0].client.get("/v1/loads"))["loads"]
    return int(load["num_running_reqs"])


async def test_default_job_learns_on_sglang(server: ServerProcess, tmp_path: Path) -> None:
    """The server is one that was running, with other weights of the same shape."""
    (tmp_path / "small.yaml").write_text(json.dumps(SMALL))
    run = tmp_path / "run"
    words = ["--config", str(tmp_path / "small.yaml"), "--engine", server.url, "--steps", "2", "--out", str(run)]
    with anyio.fail_after(1500):
        done = await anyio.run_process([sys.executable, "-m", "trainer.cli", *words], cwd=ROOT, check=False)
    output = done.stdout.decode() + done.stderr.decode()
    assert done.returncode == 0, output
    assert "rollouts are generated by the sglang 0.5.23 engine" in output
    about = json.loads((run / "run.json").read_text())
    assert about["engine"] == "sglang 0.5.23" and about["settings"]["engine"] == server.url
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps] == [0, 1, 2]
    assert [step["rollout/lost"] for step in steps[1:]] == [0, 0]
    learned = [step for step in steps[1:] if step["groups/teaching"]]
    assert learned and all(step["mismatch/max"] <= ROUNDED and step["mismatch/pass_skipped"] == 1 for step in learned)
