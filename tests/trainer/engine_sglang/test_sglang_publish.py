"""Publishing weights to servers, verifying them, and releasing memory around updates."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path

import anyio
import pytest
import torch
from anyio import from_thread
from hypothesis import given
from hypothesis import strategies as st
from starlette.responses import JSONResponse
from torch import Tensor

from tests.trainer.engine_sglang.engine_harness import opened, serving, start_turn
from tests.trainer.engine_sglang.fake_sglang import IDS, NAME, Fake, reads, weights
from tests.waiting import wait_until
from trainer.engine.base import EngineError, Sampling, plan_buckets
from trainer.engine.host_copies import ALIGNMENT, HostCopies
from trainer.engine.sglang.sglang_engine import SGLangEngine
from trainer.engine.sglang.weight_sync.disk import DiskSync
from trainer.engine.sglang.weight_sync.verify import check_agreement


@pytest.mark.parametrize("release", ["0.5.17", "0.5.23"])
async def test_weights_are_sent_in_the_form_that_each_release_accepts(release: str) -> None:
    fake, new = Fake(release), weights(1)
    async with opened(fake, finds=reads(new)) as engine:
        assert engine.version == -1 and not engine.capabilities.is_exact
        await engine.publish(new, 3)
        assert engine.version == 3 and engine.capabilities.is_exact
        written = await engine.generate(IDS, Sampling(max_tokens=2))
    assert fake.weights[NAME].equal(new[NAME]) and written.version == 3 and not fake.updating
    assert len(fake.bodies("/begin_weight_update")) == (release == "0.5.23")
    assert engine.agreement and engine.agreement.max_difference < 1e-6


async def test_server_with_the_previous_weights_ends_the_run_even_if_they_differ_little() -> None:
    old = weights(1)
    new = {NAME: old[NAME] + 2e-3 * weights(2)[NAME]}
    fake, now = Fake(), [old]
    async with opened(fake, finds=lambda ids, _: reads(now[0])(ids)) as engine:
        await engine.publish(old, 1)
        fake.deaf, now[0] = True, new
        with pytest.raises(EngineError, match="has the previously published weights"):
            await engine.publish(new, 2)


async def test_another_training_that_publishes_to_the_same_server_ends_the_run() -> None:
    fake, new = Fake(), weights(1)
    async with opened(fake, finds=reads(new)) as engine:
        await engine.publish(new, 1)
        fake.version = "9"
        with pytest.raises(
            EngineError, match=r"another training publishes to it\n  remedy: give each training servers"
        ):
            await engine.publish(new, 2)


async def test_refused_weights_end_the_run_and_generation_resumes() -> None:
    fake = Fake()
    fake.fails["/update_weights_from_tensor"] = JSONResponse({"success": False, "message": "shapes differ"})
    async with opened(fake) as engine:
        with pytest.raises(EngineError, match="shapes differ"):
            await engine.publish(weights(1), 1)
        assert not fake.updating
        assert len((await engine.generate(IDS, Sampling(max_tokens=2))).ids) == 2


async def test_generation_continues_under_new_weights_with_versions_per_id() -> None:
    fake, new = Fake(hold_at=3), weights(1)
    async with opened(fake, finds=reads(new)) as engine, anyio.create_task_group() as tasks:
        ended = start_turn(tasks, engine, Sampling(max_tokens=6))
        await wait_until(lambda: fake.held)
        await engine.publish(new, 7)
        fake.released.set()
        await wait_until(lambda: ended)
    assert ended[0].versions == (0, 0, 0, 7, 7, 7)
    assert ended[0].version == 7 and ended[0].earlier_versions == ((0, 3),)


async def test_versions_stay_with_their_ids_when_banned_ids_are_taken_back() -> None:
    fake, new = Fake(hold_at=2), weights(1)
    wanted = int(new[NAME].softmax(-1).sum(0).argmax())
    async with opened(fake, finds=reads(new)) as engine, anyio.create_task_group() as tasks:
        ended = start_turn(tasks, engine, Sampling(max_tokens=40, banned_ids=(wanted,)))
        await wait_until(lambda: fake.held)
        await engine.publish(new, 3)
        fake.hold_at = None
        fake.released.set()
        await wait_until(lambda: ended)
    keys = [body["extra_key"] for body in fake.bodies("/generate") if body.get("extra_key")]
    assert keys[0].endswith(" -1") and len(keys) > 1 and all(key.endswith(" 3") for key in keys[1:]), (
        "an id that was taken back is drawn by another request, which does not reuse the cache of old weights"
    )
    assert ended[0].versions == (0, 0) + (3,) * 38 and wanted not in ended[0].ids


async def test_kv_cache_is_not_shared_across_versions() -> None:
    fake = Fake()
    async with opened(fake, in_place=True) as engine:
        await engine.publish(weights(1), 1)
        await engine.generate(IDS, Sampling(max_tokens=2), key="a")
        assert (await engine.generate(IDS, Sampling(max_tokens=2), key="a")).cached_tokens == len(IDS) - 1
        await engine.publish(weights(2), 2)
        assert (await engine.generate(IDS, Sampling(max_tokens=2), key="a")).cached_tokens == 0
    assert not any(body["flush_cache"] for body in fake.bodies("/update_weights_from_tensor"))


def test_host_copies_stay_as_they_are_and_use_their_memory_again() -> None:
    copies, tensor = HostCopies(), torch.zeros(3)
    copies.take([("a", tensor), ("b", tensor[:2])])
    buffer = copies["a"]
    tensor += 1
    assert copies["a"].equal(torch.zeros(3))
    copies.take([("a", tensor), ("b", tensor[:2])])
    assert copies["a"] is buffer and buffer.equal(torch.ones(3))
    copies.take([("a", tensor.bfloat16())])
    assert {**copies}.keys() == {"a"} and copies["a"].dtype == torch.bfloat16


@given(st.lists(st.tuples(st.sampled_from([torch.uint8, torch.bfloat16, torch.float32]), st.integers(0, 40))))
def test_tensors_share_blocks_of_a_power_of_two(kinds: list[tuple[torch.dtype, int]]) -> None:
    tensors = {str(index): torch.arange(count).to(dtype) for index, (dtype, count) in enumerate(kinds)}
    copies = HostCopies()
    copies.take(tensors.items())
    assert all(copies[name].equal(tensor) for name, tensor in tensors.items())
    sizes = {
        copy.untyped_storage().data_ptr(): copy.untyped_storage().nbytes() for copy in copies.values() if copy.nbytes
    }
    assert all(size.bit_count() == 1 for size in sizes.values())
    wanted = sum(-(-tensor.nbytes // ALIGNMENT) * ALIGNMENT for tensor in tensors.values())
    assert sum(sizes.values()) <= max(2 * wanted + max(sizes.values(), default=0), 2 * ALIGNMENT)


@pytest.mark.parametrize(
    ("server", "dtype", "problem"),
    [
        ([-1.0, -2.5], "float32", "differ from the trainer's by up to 0.5 nats"),
        ([-1.0, float("nan")], "bfloat16", "has other weights"),
        ([-1.0], "float32", "returned 1 logprobs for a prompt that has 2"),
        ([-1.009, -2.0], "float32", "previously published weights"),
    ],
)
def test_stale_weights_are_distinguished_from_other_weights(server: list[float], dtype: str, problem: str) -> None:
    with pytest.raises(EngineError, match=problem):
        check_agreement("http://a", server, [-1.0, -2.0], [-1.01, -2.0], dtype)


def rounded(finds: Sequence[float], by: float, draw: random.Random) -> list[float]:
    """As a server finds it that computes in 16 bits."""
    return [one + draw.gauss(0, by) for one in finds]


def test_rounding_in_16_bits_is_not_mistaken_for_stale_weights() -> None:
    draw = random.Random(0)
    for _ in range(5000):
        trainer = [-draw.expovariate(0.3) for _ in range(31)]
        before = rounded(trainer, 10 ** draw.uniform(-6, -1), draw)
        noise = draw.choice((0.002, 0.01, 0.03))
        check_agreement("http://a", rounded(trainer, noise, draw), trainer, before, "bfloat16")


def test_stale_weights_in_16_bits_are_found_beyond_rounding() -> None:
    draw = random.Random(0)
    for _ in range(500):
        before = [-draw.expovariate(0.3) for _ in range(31)]
        trainer = [one + draw.choice((-0.2, 0.2)) for one in before]
        with pytest.raises(EngineError, match="previously published weights"):
            check_agreement("http://a", rounded(before, 0.01, draw), trainer, before, "bfloat16")


async def test_memory_is_released_for_an_update_and_resumed_around_the_weight_sync() -> None:
    fake, new = Fake(), weights(1)
    async with opened(fake, finds=reads(new), releases_memory=True) as engine:
        before = len(fake.asked)
        assert await engine.release_memory() and fake.released_tags == {"weights", "kv_cache"}
        await engine.publish(new, 1)
        written = await engine.generate(IDS, Sampling(max_tokens=3))
        assert await engine.release_memory()
        await engine.publish(new, 2)
    assert written.version == 1 and not fake.released_tags
    told = [(path.strip("/"), body.get("tags")) for path, body in fake.asked[before:] if path != "/generate"]
    once = [
        ("pause_generation", None),
        ("release_memory_occupation", ["weights", "kv_cache"]),
        ("pause_generation", None),
        ("resume_memory_occupation", ["weights"]),
        ("begin_weight_update", None),
        ("update_weights_from_tensor", None),
        ("end_weight_update", None),
        ("resume_memory_occupation", ["kv_cache"]),
        ("continue_generation", None),
    ]
    assert told == once * 2


async def test_server_restarted_while_memory_is_released_is_not_asked_to_resume() -> None:
    fake, new = Fake(), weights(1)
    async with opened(fake, finds=reads(new), releases_memory=True) as engine:
        await engine.publish(new, 1)
        await engine.release_memory()
        fake.start_anew()
        fake.released_tags.clear()
        for replica in engine.replicas:
            replica.released = []  # As when it is us who start it.
        await engine.publish(new, 2)
        assert (await engine.generate(IDS, Sampling(max_tokens=3))).version == 2


@pytest.mark.parametrize("ranks", [1, 2])
async def test_folder_of_weights_stays_until_the_next_publish_where_other_ranks_may_still_read_it(
    tmp_path: Path, ranks: int
) -> None:
    for name in ("model", "shared"):
        (tmp_path / name).mkdir()
    way = DiskSync(tmp_path / "model", tmp_path / "shared")
    async with serving(Fake(info={"tp_size": ranks})) as urls, SGLangEngine(urls, way) as engine:
        for version in (1, 2):
            await engine.publish(weights(version), version)
            left = [folder.name.rsplit("-", 1)[0] for folder in (tmp_path / "shared").iterdir()]
            assert left == ([f"weights-{version}"] if ranks > 1 else [])
    assert not [*(tmp_path / "shared").iterdir()]


async def test_draft_model_is_left_as_it_is_and_what_it_proposes_is_counted(tmp_path: Path) -> None:
    fake, new = Fake(info={"speculative_algorithm": "EAGLE", "enable_deterministic_inference": True}), weights(1)
    async with opened(fake, finds=reads(new)) as engine:
        await engine.publish(new, 1)
        await engine.generate(IDS, Sampling(max_tokens=4))
        assert engine.counters["drafts/proposed"] == 4 and engine.counters["drafts/correct"] == 3
        assert any("samples without seeds" in note for note in engine.capabilities.notes)
    for path in ("/begin_weight_update", "/update_weights_from_tensor"):
        assert [body.get("selector") for body in fake.bodies(path)] == ["target"]
    async with serving(fake) as urls, SGLangEngine(urls, DiskSync(tmp_path)) as engine:
        with pytest.raises(EngineError, match="into its draft model, too: use `serving"):
            await engine.publish(new, 2)


def test_weights_that_servers_stack_are_not_cut_apart() -> None:
    sizes = {"model.embed.weight": 5, "lm_head.weight": 9} | {
        f"model.layers.{layer}.attn.{name}": size
        for layer, size in enumerate((1, 3))
        for name in ("q.weight", "q.bias", "k.weight", "o.weight")
    }
    buckets = [[sizes[name] for name in bucket] for bucket in plan_buckets(sizes, 8)]
    assert buckets == [[5], [9], [1, 1, 1, 1], [3, 3], [3, 3]], "more than a bucket can hold starts one"


async def test_whole_weights_are_published_to_a_quantised_server_only_if_it_quantises_them() -> None:
    fake, new = Fake(info={"quantization": "fp8"}), weights(1)
    async with opened(fake) as engine:
        assert (await engine.generate(IDS, Sampling(max_tokens=1))).ids, "it may be evaluated"
        with pytest.raises(EngineError, match="has weights in fp8"):
            await engine.publish(new, 1)
        assert not fake.bodies("/update_weights_from_tensor")
    fake.info["load_format"] = "flash_rl"
    async with opened(fake, finds=reads(new)) as engine:
        await engine.publish(new, 1)


async def test_new_turns_start_while_published_weights_are_copied_and_a_lost_server_waits_for_the_copy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake, new, copying, copied = Fake(), weights(1), anyio.Event(), threading.Event()
    take = HostCopies.take

    def take_later(copies: HostCopies, tensors: Iterable[tuple[str, Tensor]]) -> None:
        from_thread.run_sync(copying.set)
        assert copied.wait(60)
        take(copies, tensors)

    async with opened(fake, finds=reads(new)) as engine:
        monkeypatch.setattr(HostCopies, "take", take_later)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(engine.publish, new, 1)
            await copying.wait()
            assert (await engine.generate(IDS, Sampling(max_tokens=2))).versions == (1, 1)
            fake.break_down()
            with anyio.fail_after(60):
                tasks.start_soon(engine.generate, IDS, Sampling(max_tokens=2))
                await wait_until(lambda: not engine.replicas[0].up)
                fake.start_anew()
                assert fake.version == "default"
                copied.set()
                await wait_until(lambda: engine.replicas[0].up)
            assert fake.version == "1" and fake.weights[NAME].equal(new[NAME])
