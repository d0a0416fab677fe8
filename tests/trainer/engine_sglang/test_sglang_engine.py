"""The SGLang engine against fake servers: requests, answers and failures."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import anyio
import pytest
from anyio import from_thread
from PIL import Image as Pictures
from starlette.responses import JSONResponse

from gateway.media.sniff import to_data_uri
from gateway.types import Image
from tests.trainer.engine_sglang.engine_harness import opened, serving
from tests.trainer.engine_sglang.fake_sglang import IDS, NAME, Fake, reads, weights
from tests.trainer.vision.vision_models import odd_pictures, picture
from tests.waiting import wait_until
from trainer.engine.base import EngineError, Sampling
from trainer.engine.sglang.request import PngEncoder
from trainer.engine.sglang.sglang_engine import SGLangEngine
from trainer.engine.sglang.weight_sync.tensors import TensorSync
from trainer.vision.image_processor import decode_image


async def test_requests_ask_for_ids_and_logprobs_of_sampled_ids_only() -> None:
    fake = Fake()
    sampling = Sampling(max_tokens=4, temperature=0.5, top_p=0.9, top_k=7, stop_ids=(3,), seed=2**60)
    async with opened(fake) as engine:
        await engine.generate(IDS, sampling, key="0-0/t/1")
    body = fake.bodies("/generate")[-1]
    assert body["input_ids"] == list(IDS) and "text" not in body
    assert body["return_logprob"] and "logprob_start_len" not in body
    params = body["sampling_params"]
    assert params["max_new_tokens"] == 4 and params["temperature"] == 0.5 and params["top_k"] == 7
    assert params["stop_token_ids"] == [3] and params["sampling_seed"] == 2**60
    assert body["rid"].startswith("0-0/t/1#")


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_banned_ids_are_never_sampled_and_do_not_change_logprobs(temperature: float) -> None:
    fake, barred = Fake(), tuple(range(0, 40, 2))
    async with opened(fake) as engine:
        written = await engine.generate(IDS, Sampling(max_tokens=50, temperature=temperature, banned_ids=barred))
    assert len(written.ids) == 50 and not {*written.ids} & {*barred}
    if temperature:
        assert written.logprobs == pytest.approx(reads(fake.weights)((IDS[-1], *written.ids)), abs=1e-6)


async def test_concurrent_siblings_prefill_their_prompt_once() -> None:
    fake, ended = Fake(), []
    async with opened(fake) as engine, anyio.create_task_group() as tasks:

        async def write(index: int) -> None:
            key = f"0-0/t/{index}"
            ended.append(await engine.generate(IDS, Sampling(max_tokens=2), key=key, group="0-0"))

        for index in range(8):
            tasks.start_soon(write, index)
        await wait_until(lambda: len(ended) == 8)
    assert sorted(written.cached_tokens for written in ended) == [0] + [len(IDS) - 1] * 7


async def test_cancelled_request_is_aborted_on_the_server() -> None:
    fake = Fake(hold_at=1)
    async with opened(fake) as engine:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(engine.generate, IDS, Sampling(max_tokens=4))
            await wait_until(lambda: fake.writing)
            tasks.cancel_scope.cancel()
        assert fake.aborted == {fake.bodies("/generate")[-1]["rid"]}


async def test_turns_of_a_lost_server_move_and_it_returns_with_the_weights() -> None:
    first, second = Fake(), Fake()
    async with opened(first, second) as engine:
        await engine.publish(weights(1), 1)
        first.break_down()
        written = [await engine.generate(IDS, Sampling(max_tokens=3), key=str(place)) for place in range(4)]
        assert all(len(one.ids) == 3 and one.version == 1 for one in written)
        assert [replica.up for replica in engine.replicas] == [False, True]
        await engine.publish(weights(2), 2)
        first.start_anew()
        await wait_until(lambda: engine.replicas[0].up)
        assert engine.counters["servers_lost"] == engine.counters["restarts"] == 1
    assert first.weights[NAME].equal(weights(2)[NAME]) and first.version == "2"


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"output_ids": [1, 2]}, "returned 2 ids and logprobs of 1 others"),
        ({"meta_info": {}}, "answered in an unknown form"),
        ({"read": 19}, "read 19 ids where it was asked to continue 20"),
    ],
)
async def test_answer_with_other_ids_is_an_error(changed: dict[str, object], problem: str) -> None:
    fake = Fake()
    async with opened(fake) as engine:
        read = changed.pop("read", 20)
        meta = {"finish_reason": {"type": "stop"}, "prompt_tokens": read, "output_token_logprobs": [[-1.0, 1, None]]}
        fake.fails["/generate"] = JSONResponse({"output_ids": [1], "meta_info": meta} | changed)
        with pytest.raises(EngineError, match=problem):
            await engine.generate(IDS, Sampling())


@pytest.mark.parametrize(
    ("fake", "problem"),
    [
        (Fake("0.5.16"), r"0\.5\.16 at .* is too old: use one of 0\.5\.17 to 0\.5\.23"),
        (Fake(info={"dp_size": 2}), "start a server for each replica"),
        (Fake(info={"disaggregation_mode": "decode"}), "only does decode, and mixes .* use servers that do both"),
        (Fake(info={"speculative_accept_threshold_acc": 0.0}), "would not have sampled"),
        (Fake(info={"speculative_algorithm": "NGRAM"}, greedy=True), "NGRAM takes the likeliest id"),
    ],
)
async def test_unusable_server_is_reported_with_a_remedy(fake: Fake, problem: str) -> None:
    async with serving(fake) as urls:
        with pytest.raises(EngineError, match=problem):
            async with SGLangEngine(urls, TensorSync()):
                pass


async def test_images_are_sent_beside_ids_and_counted_with_the_servers_width() -> None:
    images = (picture(1), picture(2))
    async with opened(fake := Fake(sees=(4, 9))) as engine:
        assert engine.capabilities.supports_images
        written = await engine.generate(IDS, Sampling(max_tokens=2), key="k", group="g", images=images)
        assert (await engine.generate(IDS, Sampling(max_tokens=2))).prompt_tokens == len(IDS)
    sent = [to_data_uri(image) for image in images]
    asked = [body for body in fake.bodies("/generate") if body.get("image_data")]
    assert [(body["input_ids"], body["image_data"]) for body in asked] == [([*IDS], sent)] * 2
    assert written.prompt_tokens == len(IDS) + 3 + 8


async def test_image_is_encoded_once_for_all_siblings_and_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []

    def noted(image: Image) -> Pictures.Image:
        made.append(image.digest)
        from_thread.run(anyio.wait_all_tasks_blocked)  # All siblings have asked by then.
        return decode_image(image)

    one, other = odd_pictures()["RGBA"], odd_pictures()["turned"]
    async with opened(Fake(sees=(4, 4))) as engine:
        monkeypatch.setattr(engine, "_image_encoder", PngEncoder(noted))
        async with anyio.create_task_group() as tasks:
            for _ in range(8):
                tasks.start_soon(partial(engine.generate, IDS, Sampling(max_tokens=1), images=(one,)))
        await engine.generate(IDS, Sampling(max_tokens=1), images=(one, other))
    assert made == [one.digest, other.digest]


async def test_logprobs_of_another_temperature_are_refused() -> None:
    async with opened(Fake(original=True)) as engine:
        assert len((await engine.generate(IDS, Sampling(max_tokens=1))).ids) == 1
        with pytest.raises(EngineError, match="SGLANG_RETURN_ORIGINAL_LOGPROB"):
            await engine.generate(IDS, replace(Sampling(), temperature=0.7))


def test_non_finite_numbers_are_never_sent() -> None:
    from trainer.engine.sglang.request import BAN_BIAS

    assert math.isfinite(BAN_BIAS)


@pytest.mark.parametrize("sends_new_only", [False, True])
async def test_ids_come_one_by_one_and_make_the_turn(sends_new_only: bool) -> None:
    fake, seen = Fake(sends_new_only=sends_new_only), []
    async with opened(fake) as engine:
        written = await engine.generate(IDS, Sampling(max_tokens=12), on_ids=lambda ids: seen.append(tuple(ids)))
    assert [len(ids) for ids in seen] == [1] * 12 and sum(seen, ()) == written.ids
    assert written.logprobs == pytest.approx(reads(fake.weights)((IDS[-1], *written.ids)), abs=1e-6)
    assert fake.bodies("/generate")[-1]["stream"] and "stream" not in fake.bodies("/generate")[0]


async def test_turn_whose_ids_were_seen_does_not_start_again() -> None:
    fake, seen = Fake(breaks_off=True), list[int]()
    async with opened(fake) as engine:
        before = len(fake.bodies("/generate"))
        with pytest.raises(EngineError, match="cannot be reached"):
            await engine.generate(IDS, Sampling(max_tokens=5), on_ids=seen.extend)
        assert len(seen) == 1 and len(fake.bodies("/generate")) == before + 1
