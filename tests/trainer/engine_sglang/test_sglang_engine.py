"""The engine against servers that answer as SGLang does: what is asked, what is made of answers, and of none."""

from __future__ import annotations

import io
import math
import subprocess
import sys
from dataclasses import replace
from functools import partial

import anyio
import pytest
from anyio import from_thread
from PIL import Image as Pictures
from starlette.responses import JSONResponse

from gateway.media.kind import data_uri, of_data_uri
from gateway.types import Image
from tests.trainer.engine_sglang.asked import opened, serving, until
from tests.trainer.engine_sglang.fake_sglang import IDS, NAME, Fake, reads, weights
from tests.trainer.vision.seeing import odd_pictures, picture
from trainer.engine.base import EngineError, Sampling, Written
from trainer.engine.sglang.engine import SGLangEngine
from trainer.engine.sglang.prints import Prints
from trainer.engine.sglang.publish.tensors import ByTensors
from trainer.engine.sglang.wire import Gone
from trainer.vision.eyes import seen


async def test_what_is_asked_are_ids_and_logprobs_of_what_is_sampled_alone() -> None:
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


async def test_what_was_written_has_the_logprobs_of_its_temperature() -> None:
    fake = Fake()
    async with opened(fake) as engine:
        written = await engine.generate(IDS, Sampling(max_tokens=30, temperature=2.0))
    assert len(written.ids) == len(written.logprobs) == 30 and written.stop == "length"
    ours = reads({NAME: fake.weights[NAME] / 2.0})((IDS[-1], *written.ids))
    assert written.logprobs == pytest.approx(ours, abs=1e-6)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_barred_ids_are_not_written_and_logprobs_are_as_if_they_could_be(temperature: float) -> None:
    fake, barred = Fake(), tuple(range(0, 40, 2))
    async with opened(fake) as engine:
        written = await engine.generate(IDS, Sampling(max_tokens=50, temperature=temperature, barred=barred))
    assert len(written.ids) == 50 and not {*written.ids} & {*barred}
    if temperature:
        assert written.logprobs == pytest.approx(reads(fake.weights)((IDS[-1], *written.ids)), abs=1e-6)


async def test_a_policy_that_wants_nothing_but_barred_ids_is_told() -> None:
    async with opened(Fake()) as engine:
        with pytest.raises(EngineError, match="256 times"):
            await engine.generate(IDS, Sampling(max_tokens=5, barred=tuple(range(40))))


async def test_a_stop_id_ends_a_turn_and_belongs_to_it() -> None:
    async with opened(Fake()) as engine:
        first = (await engine.generate(IDS, Sampling(max_tokens=1, temperature=0))).ids
        written = await engine.generate(IDS, Sampling(max_tokens=9, temperature=0, stop_ids=first))
    assert written.stop == "stop" and written.ids == first


async def test_nothing_is_asked_where_nothing_may_be_written() -> None:
    fake = Fake()
    async with opened(fake) as engine:
        before = len(fake.asked)
        assert await engine.generate(IDS, Sampling(max_tokens=0)) == Written((), (), "length")
        assert len(fake.asked) == before


async def test_siblings_that_come_at_once_read_their_opening_once() -> None:
    fake, ended = Fake(), []
    async with opened(fake) as engine, anyio.create_task_group() as tasks:

        async def write(index: int) -> None:
            key = f"0-0/t/{index}"
            ended.append(await engine.generate(IDS, Sampling(max_tokens=2), key=key, group="0-0"))

        for index in range(8):
            tasks.start_soon(write, index)
        await until(lambda: len(ended) == 8)
    assert sorted(written.cached for written in ended) == [0] + [len(IDS) - 1] * 7


async def test_an_aborted_rollout_gets_what_it_has_and_the_others_go_on() -> None:
    fake, ended = Fake(hold_at=3), {}
    async with opened(fake) as engine, anyio.create_task_group() as tasks:

        async def write(key: str) -> None:
            ended[key] = await engine.generate(IDS, Sampling(max_tokens=5), key=key)

        for key in ("t/1", "t/10"):
            tasks.start_soon(write, key)
        await until(lambda: fake.writing == 2)
        await engine.abort("t/1")
        await until(lambda: len(ended) == 2)
    assert ended["t/1"].stop == "abort" and len(ended["t/1"].ids) == len(ended["t/1"].logprobs) == 3
    assert ended["t/10"].stop == "length"


async def test_who_stops_waiting_has_the_server_stop_writing() -> None:
    fake = Fake(hold_at=1)
    async with opened(fake) as engine:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(engine.generate, IDS, Sampling(max_tokens=4))
            await until(lambda: fake.writing)
            tasks.cancel_scope.cancel()
        assert fake.aborted == {fake.bodies("/generate")[-1]["rid"]}


async def test_what_a_lost_server_wrote_is_written_elsewhere_and_it_comes_back_with_the_weights() -> None:
    first, second = Fake(), Fake()
    async with opened(first, second) as engine:
        await engine.publish(weights(1), 1)
        first.break_down()
        written = [await engine.generate(IDS, Sampling(max_tokens=3), key=str(place)) for place in range(4)]
        assert all(len(one.ids) == 3 and one.version == 1 for one in written)
        assert [replica.up for replica in engine.replicas] == [False, True]
        await engine.publish(weights(2), 2)
        first.start_anew()
        await until(lambda: engine.replicas[0].up)
    assert first.weights[NAME].equal(weights(2)[NAME]) and first.version == "2"


async def test_where_it_was_the_only_one_whoever_asked_waits_for_it() -> None:
    fake, ended = Fake(), []
    async with opened(fake, finds=reads(weights(1))) as engine, anyio.create_task_group() as tasks:
        await engine.publish(weights(1), 1)
        fake.break_down()

        async def write(key: str) -> None:
            ended.append(await engine.generate(IDS, Sampling(max_tokens=3), key=key))

        for key in ("a", "b"):
            tasks.start_soon(write, key)
        await until(lambda: not engine.replicas[0].up)
        fake.start_anew()
        await until(lambda: len(ended) == 2)
    assert [one.version for one in ended] == [1, 1] and fake.weights[NAME].equal(weights(1)[NAME])


async def test_a_server_that_was_started_anew_behind_our_back_is_given_the_weights_before_it_writes() -> None:
    fake = Fake()
    async with opened(fake, finds=reads(weights(1))) as engine:
        await engine.publish(weights(1), 1)
        fake.start_anew()
        written = await engine.generate(IDS, Sampling(max_tokens=20))
        assert engine.replicas[0].up
    assert written.version == 1
    assert written.logprobs == pytest.approx(reads(weights(1))((IDS[-1], *written.ids)), abs=1e-6)


async def test_without_any_server_the_error_names_it() -> None:
    fake = Fake()
    async with opened(fake) as engine:
        fake.fails["/generate"] = JSONResponse({"detail": "out of memory"}, 500)
        with pytest.raises(Gone, match=rf"{fake.url} failed at /generate \(500\): out of memory"):
            await engine.generate(IDS, Sampling())


async def test_a_server_that_ended_what_nobody_ended_is_not_taken_at_its_word() -> None:
    fake = Fake()
    async with opened(fake) as engine:
        meta = {"finish_reason": {"type": "abort", "message": "shutting down"}, "weight_version": "default"}
        fake.fails["/generate"] = JSONResponse({"output_ids": [], "meta_info": meta})
        with pytest.raises(Gone, match="stopped writing: shutting down"):
            await engine.generate(IDS, Sampling())


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"output_ids": [1, 2]}, "wrote 2 ids and gave logprobs of 1"),
        ({"meta_info": {}}, "in a form that we do not know"),
        ({"read": 19}, "read 19 ids where it was asked to continue 20"),
    ],
)
async def test_an_answer_of_other_ids_is_an_error(changed: dict[str, object], problem: str) -> None:
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
        (Fake("0.5.6"), r"0\.5\.6 at .* is too old: use one of 0\.5\.9 to 0\.5\.23"),
        (Fake(lacks=frozenset({"/pause_generation"})), "has no /pause_generation"),
        (Fake(info={"dp_size": 2}), "start a server for each replica"),
    ],
)
async def test_a_server_that_cannot_be_worked_with_is_named_with_what_to_do(fake: Fake, problem: str) -> None:
    async with serving(fake) as urls:
        with pytest.raises(EngineError, match=problem):
            async with SGLangEngine(urls, ByTensors()):
                pass


async def test_a_newer_release_is_used_and_told() -> None:
    async with opened(Fake(info={"version": "0.6.0"})) as engine:
        assert any("newer than any that was tested" in note for note in engine.capabilities.notes)


@pytest.mark.parametrize(
    ("info", "sampling", "problem"),
    [
        ({"skip_tokenizer_init": True}, Sampling(stop=("end",)), "--skip-tokenizer-init"),
        ({"enable_deterministic_inference": True}, Sampling(min_p=0.1), "min_p"),
        ({"max_req_input_len": 20}, Sampling(), "20 ids leave no room"),
    ],
)
async def test_what_a_server_would_do_otherwise_is_refused(
    info: dict[str, object], sampling: Sampling, problem: str
) -> None:
    async with opened(Fake(info=info)) as engine:
        with pytest.raises(EngineError, match=problem):
            await engine.generate(IDS, sampling)


async def test_images_are_refused_where_the_model_sees_none() -> None:
    async with opened(Fake()) as engine:
        with pytest.raises(EngineError, match="sees no images"):
            await engine.generate(IDS, Sampling(), images=(Image(b"png"),))


async def test_images_go_beside_the_ids_and_are_counted_as_wide_as_the_server_sees_them() -> None:
    images = (picture(1), picture(2))
    async with opened(fake := Fake(sees=(4, 9))) as engine:
        assert engine.capabilities.images
        written = await engine.generate(IDS, Sampling(max_tokens=2), key="k", group="g", images=images)
        assert (await engine.generate(IDS, Sampling(max_tokens=2))).read == len(IDS)
    sent = [data_uri(image) for image in images]
    asked = [body for body in fake.bodies("/generate") if body.get("image_data")]
    assert [(body["input_ids"], body["image_data"]) for body in asked] == [([*IDS], sent)] * 2
    assert written.read == len(IDS) + 3 + 8


async def test_a_server_is_sent_what_the_trainers_eyes_see_whatever_the_file_is_like() -> None:
    images = [picture(1), *odd_pictures().values()]
    async with opened(fake := Fake(sees=(4,) * len(images))) as engine:
        await engine.generate(IDS, Sampling(max_tokens=2), images=images)
    body = fake.bodies("/generate")[-1]
    sent = [of_data_uri(uri) for uri in body["image_data"]]
    assert sent[0] == images[0] and {one.mime for one in sent} == {"image/png"}
    for one, image in zip(sent, images, strict=True):
        pixels = Pictures.open(io.BytesIO(one.data))
        assert pixels.mode == "RGB" and not {"transparency", "exif"} & {*pixels.info}
        assert pixels.tobytes() == seen(image).tobytes()


async def test_a_picture_is_made_ready_to_be_sent_once_for_all_siblings_and_turns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[str] = []

    def noted(image: Image) -> Pictures.Image:
        made.append(image.digest)
        from_thread.run(anyio.wait_all_tasks_blocked)  # All siblings have asked by then.
        return seen(image)

    one, other = odd_pictures()["RGBA"], odd_pictures()["turned"]
    async with opened(Fake(sees=(4, 4))) as engine:
        monkeypatch.setattr(engine, "_prints", Prints(noted))
        async with anyio.create_task_group() as tasks:
            for _ in range(8):
                tasks.start_soon(partial(engine.generate, IDS, Sampling(max_tokens=1), images=(one,)))
        await engine.generate(IDS, Sampling(max_tokens=1), images=(one, other))
    assert made == [one.digest, other.digest]


async def test_what_is_no_picture_is_told_before_a_server_is_asked() -> None:
    async with opened(fake := Fake(sees=(4,))) as engine:
        asked = len(fake.bodies("/generate"))
        with pytest.raises(EngineError, match="SGLang cannot be shown a picture"):
            await engine.generate(IDS, Sampling(), images=(Image(b"none"),))
        assert len(fake.bodies("/generate")) == asked


async def test_what_is_read_is_counted_once_however_often_an_id_is_taken_back() -> None:
    async with opened(fake := Fake(sees=(4,))) as engine:
        barred = tuple(range(20))
        written = await engine.generate(IDS, Sampling(max_tokens=8, barred=barred), images=(picture(1),))
    assert len(fake.bodies("/generate")) > 3 and not set(written.ids) & set(barred)
    assert written.read == len(IDS) + 3 and len(written.ids) == 8


async def test_logprobs_of_another_temperature_are_refused() -> None:
    async with opened(Fake(original=True)) as engine:
        assert len((await engine.generate(IDS, Sampling(max_tokens=1))).ids) == 1
        with pytest.raises(EngineError, match="SGLANG_RETURN_ORIGINAL_LOGPROB"):
            await engine.generate(IDS, replace(Sampling(), temperature=0.7))


async def test_an_address_where_nothing_is_is_told() -> None:
    engine = SGLangEngine(["http://127.0.0.1:9"], ByTensors())
    with pytest.raises(EngineError, match="cannot be reached"):
        async with engine:
            pass


def test_the_trainer_never_imports_sglang() -> None:
    code = "import sys, trainer.engine.sglang.engine; print('sglang' in sys.modules, 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["False", "True"]


def test_no_number_that_json_cannot_write_is_sent() -> None:
    from trainer.engine.sglang.request import BARRED

    assert math.isfinite(BARRED)
