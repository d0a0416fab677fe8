"""Publishing weights: what servers are given, and what is believed of what they say they have."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import anyio
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from starlette.responses import JSONResponse

from tests.trainer.engine_sglang.asked import opened, serving, until
from tests.trainer.engine_sglang.fake_sglang import IDS, NAME, Fake, reads, weights
from trainer.engine.base import EngineError, Sampling, Written
from trainer.engine.sglang.agree import agreed
from trainer.engine.sglang.engine import SGLangEngine
from trainer.engine.sglang.own import Own
from trainer.engine.sglang.publish.disk import ByDisk
from trainer.engine.sglang.publish.group import here
from trainer.engine.sglang.publish.tensors import flattened
from trainer.engine.sglang.publish.way import buckets, distinct


@pytest.mark.parametrize("release", ["0.5.9", "0.5.23"])
async def test_each_release_is_given_weights_as_it_takes_them(release: str) -> None:
    fake, new = Fake(release), weights(1)
    async with opened(fake, finds=reads(new)) as engine:
        assert engine.version == -1 and not engine.capabilities.exact
        await engine.publish(new, 3)
        assert engine.version == 3 and engine.capabilities.exact
        written = await engine.generate(IDS, Sampling(max_tokens=2))
    assert fake.weights[NAME].equal(new[NAME]) and written.version == 3 and not fake.updating
    assert len(fake.bodies("/begin_weight_update")) == (release == "0.5.23")
    assert engine.agreement and engine.agreement.most < 1e-6


async def test_weights_by_disk_leave_nothing_there(tmp_path: Path) -> None:
    fake, new = Fake(), weights(1)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "shared").mkdir()
    way = ByDisk(tmp_path / "model", tmp_path / "shared")
    async with serving(fake) as urls, SGLangEngine(urls, way, own=Own(reads(new))) as engine:
        await engine.publish(new, 1)
    assert fake.weights[NAME].equal(new[NAME])
    assert list((tmp_path / "shared").iterdir()) == []


async def test_an_update_that_another_trainer_left_open_is_closed_first() -> None:
    fake, new = Fake(updating=True), weights(1)
    async with opened(fake, finds=reads(new)) as engine:
        await engine.publish(new, 1)
    assert fake.weights[NAME].equal(new[NAME]) and not fake.updating


async def test_a_server_that_did_not_take_the_weights_ends_the_run() -> None:
    async with opened(Fake(deaf=True), finds=reads(weights(1))) as engine:
        with pytest.raises(EngineError, match="has other weights than were published"):
            await engine.publish(weights(1), 1)


async def test_a_server_that_kept_the_weights_before_ends_the_run_though_they_differ_by_little() -> None:
    old = weights(1)
    new = {NAME: old[NAME] + 2e-3 * weights(2)[NAME]}
    fake, now = Fake(), [old]
    async with opened(fake, finds=lambda ids, _: reads(now[0])(ids)) as engine:
        await engine.publish(old, 1)
        fake.deaf, now[0] = True, new
        with pytest.raises(EngineError, match="has the weights of the time before"):
            await engine.publish(new, 2)


async def test_a_server_that_tells_another_version_ends_the_run() -> None:
    fake = Fake()
    fake.fails["/update_weights_from_tensor"] = JSONResponse({"success": True})
    async with opened(fake) as engine:
        with pytest.raises(EngineError, match="has weights -1 where 4 were published"):
            await engine.publish(weights(1), 4)


async def test_weights_that_are_refused_end_the_run_and_the_server_writes_again() -> None:
    fake = Fake()
    fake.fails["/update_weights_from_tensor"] = JSONResponse({"success": False, "message": "shapes differ"})
    async with opened(fake) as engine:
        with pytest.raises(EngineError, match="shapes differ"):
            await engine.publish(weights(1), 1)
        assert not fake.updating
        assert len((await engine.generate(IDS, Sampling(max_tokens=2))).ids) == 2


async def test_what_is_being_written_goes_on_under_new_weights_and_says_so() -> None:
    fake, new = Fake(hold_at=3), weights(1)
    async with opened(fake, finds=reads(new)) as engine, anyio.create_task_group() as tasks:
        ended: list[Written] = []

        async def write() -> None:
            ended.append(await engine.generate(IDS, Sampling(max_tokens=6), key="a"))

        tasks.start_soon(write)
        await until(lambda: fake.writing)
        await engine.publish(new, 7)
        fake.released.set()
        await until(lambda: ended)
    assert ended[0].versions == (0, 0, 0, 7, 7, 7)
    assert ended[0].version == 7 and ended[0].before == ((0, 3),)


async def test_versions_stay_with_their_ids_where_barred_ones_were_taken_back() -> None:
    fake, new = Fake(hold_at=2), weights(1)
    wanted = int(new[NAME].softmax(-1).sum(0).argmax())
    async with opened(fake, finds=reads(new)) as engine, anyio.create_task_group() as tasks:
        ended: list[Written] = []

        async def write() -> None:
            ended.append(await engine.generate(IDS, Sampling(max_tokens=40, barred=(wanted,)), key="a"))

        tasks.start_soon(write)
        await until(lambda: fake.writing)
        await engine.publish(new, 3)
        fake.hold_at = None
        fake.released.set()
        await until(lambda: ended)
    assert (
        len(fake.bodies("/generate")) > 2
    )  # Two to see who it is, one to write, and more: it had written a barred one.
    assert ended[0].versions == (0, 0) + (3,) * 38 and wanted not in ended[0].ids


async def test_what_one_version_read_is_not_read_again_by_the_next() -> None:
    fake = Fake()
    async with opened(fake, in_place=True) as engine:
        await engine.publish(weights(1), 1)
        await engine.generate(IDS, Sampling(max_tokens=2), key="a")
        assert (await engine.generate(IDS, Sampling(max_tokens=2), key="a")).cached == len(IDS) - 1
        await engine.publish(weights(2), 2)
        assert (await engine.generate(IDS, Sampling(max_tokens=2), key="a")).cached == 0
    assert not any(body["flush_cache"] for body in fake.bodies("/update_weights_from_tensor"))


async def test_while_it_is_paused_nothing_is_sampled() -> None:
    fake = Fake(hold_at=2)
    async with opened(fake) as engine, anyio.create_task_group() as tasks:
        tasks.start_soon(engine.generate, IDS, Sampling(max_tokens=4))
        await until(lambda: fake.writing)
        await engine.pause()
        fake.released.set()
        await engine.publish(weights(1), 1)  # What it has is asked about when it goes on.
        assert fake.writing == 1 and not fake.going.is_set()
        await engine.resume()
    assert fake.going.is_set() and fake.writing == 0


async def test_weights_that_did_not_arrive_while_it_was_paused_are_found_out_when_it_goes_on() -> None:
    async with opened(Fake(deaf=True), finds=reads(weights(1))) as engine:
        await engine.pause()
        await engine.publish(weights(1), 1)
        with pytest.raises(EngineError, match="other weights"):
            await engine.resume()


def test_a_tensor_with_two_names_goes_once() -> None:
    tied = torch.zeros(3, 2)
    given = {"embed": tied, "head": tied, "other": torch.zeros(3, 2), "row": tied[0]}
    assert [name for name, _ in distinct(given)] == ["embed", "other", "row"]
    with pytest.raises(EngineError, match="no weights to publish"):
        distinct({})


@given(st.lists(st.integers(1, 30), min_size=1, max_size=20), st.integers(1, 200))
def test_buckets_hold_everything_in_order_and_no_more_than_they_may(sizes: list[int], most: int) -> None:
    named = [(str(place), torch.zeros(size, dtype=torch.uint8)) for place, size in enumerate(sizes)]
    filled = list(buckets(named, most))
    assert [name for bucket in filled for name, _ in bucket] == [name for name, _ in named]
    assert all(len(bucket) == 1 or sum(tensor.nbytes for _, tensor in bucket) <= most for bucket in filled)


def test_a_flat_bucket_knows_where_each_tensor_lies_whatever_its_type() -> None:
    part = [("a", torch.randn(2, 3)), ("b", torch.randn(4).bfloat16()), ("c", torch.randn(3, 2).t())]
    flat = flattened(part)
    data, metadata = flat["flattened_tensor"], flat["metadata"]
    for (name, tensor), meta in zip(part, metadata, strict=True):  # type: ignore[call-overload]
        there = data[meta.start_idx : meta.end_idx].view(meta.dtype).reshape(meta.shape)  # type: ignore[index]
        assert meta.name == name and there.equal(tensor)


@pytest.mark.parametrize(
    ("server", "dtype", "problem"),
    [
        ([-1.0, -2.5], "float32", "differ from the trainer's by up to 0.5 nats"),
        ([-1.0, float("nan")], "bfloat16", "has other weights"),
        ([-1.0], "float32", "told 1 logprobs of a prompt with 2"),
        ([-1.009, -2.0], "float32", "weights of the time before"),
    ],
)
def test_disagreement_is_told_apart(server: list[float], dtype: str, problem: str) -> None:
    with pytest.raises(EngineError, match=problem):
        agreed("http://a", server, [-1.0, -2.0], [-1.01, -2.0], dtype)


def test_rounding_is_agreement_and_says_how_much() -> None:
    found = agreed("http://a", [-1.1, -2.0], [-1.0, -2.0], None, "bfloat16")
    assert found.most == pytest.approx(0.1) and found.mean == pytest.approx(0.05) and not found.exact
    assert agreed("http://a", [-1.0 + 1e-6, -2.0], [-1.0, -2.0], None, "float32").exact


def rounded(finds: Sequence[float], by: float, draw: random.Random) -> list[float]:
    """As a server finds it that computes in 16 bits."""
    return [one + draw.gauss(0, by) for one in finds]


def test_rounding_in_16_bits_is_never_taken_for_the_weights_before() -> None:
    draw = random.Random(0)
    for _ in range(5000):
        trainer = [-draw.expovariate(0.3) for _ in range(31)]
        before = rounded(trainer, 10 ** draw.uniform(-6, -1), draw)
        noise = draw.choice((0.002, 0.01, 0.03))
        agreed("http://a", rounded(trainer, noise, draw), trainer, before, "bfloat16")


def test_in_16_bits_the_weights_before_are_found_where_they_are_further_off_than_rounding() -> None:
    draw = random.Random(0)
    for _ in range(500):
        before = [-draw.expovariate(0.3) for _ in range(31)]
        trainer = [one + draw.choice((-0.2, 0.2)) for one in before]
        with pytest.raises(EngineError, match="weights of the time before"):
            agreed("http://a", rounded(before, 0.01, draw), trainer, before, "bfloat16")


def test_the_address_of_the_trainer_is_the_one_that_a_server_sees() -> None:
    assert here("http://127.0.0.1:30000") == "127.0.0.1"


async def test_memory_is_lent_to_an_update_and_had_back_part_by_part_around_the_new_weights() -> None:
    fake, new = Fake(), weights(1)
    async with opened(fake, finds=reads(new), lends=True) as engine:
        before = len(fake.asked)
        assert await engine.lend() and fake.lent == {"weights", "kv_cache"}
        await engine.publish(new, 1)
        written = await engine.generate(IDS, Sampling(max_tokens=3))
        assert await engine.lend()
        await engine.publish(new, 2)
    assert written.version == 1 and not fake.lent
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


async def test_an_engine_that_was_not_made_to_lend_keeps_its_memory() -> None:
    fake = Fake()
    async with opened(fake) as engine:
        assert not await engine.lend()
        await engine.publish(weights(1), 1)
    assert not fake.bodies("/release_memory_occupation") and not fake.bodies("/resume_memory_occupation")


async def test_what_is_still_written_when_memory_is_lent_goes_on_after_the_update() -> None:
    """Nobody should write then; who does keeps its place in line, as a server ends that writes without its memory."""
    fake, new = Fake(hold_at=2), weights(1)
    async with opened(fake, finds=reads(new), lends=True) as engine, anyio.create_task_group() as tasks:
        ended: list[Written] = []

        async def write() -> None:
            ended.append(await engine.generate(IDS, Sampling(max_tokens=4), key="a"))

        tasks.start_soon(write)
        await until(lambda: fake.writing)
        await engine.lend()
        fake.released.set()
        await engine.publish(new, 1)
        await until(lambda: ended)
    assert ended[0].versions == (0, 0, 1, 1)


async def test_a_server_that_is_started_anew_while_it_lends_is_not_asked_for_what_it_has() -> None:
    fake, new = Fake(), weights(1)
    async with opened(fake, finds=reads(new), lends=True) as engine:
        await engine.publish(new, 1)
        await engine.lend()
        fake.start_anew()
        fake.lent.clear()
        for replica in engine.replicas:
            replica.lent = []  # As when it is us who start it.
        await engine.publish(new, 2)
        assert (await engine.generate(IDS, Sampling(max_tokens=3))).version == 2
