"""Servers of vision models are verified with an image probe, too: text alone does not reach the vision encoder."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from gateway.media.sniff import media_from_data_uri
from gateway.types import Image
from tests.trainer.engine_sglang.engine_harness import serving
from tests.trainer.engine_sglang.fake_sglang import NAME, Fake, reads, weights
from trainer.engine.base import EngineError
from trainer.engine.sglang.server_process import VISION_CACHE_VARIABLE
from trainer.engine.sglang.sglang_engine import SGLangEngine
from trainer.engine.sglang.weight_sync.tensors import TensorSync
from trainer.engine.sglang.weight_sync.verify import TrainerReference
from trainer.vision.image_processor import decode_image

PROCESSOR: Any = SimpleNamespace(
    family=SimpleNamespace(image_id=39, frame=((37,), (38,)), banned_ids=(5, 37, 38, 39)), fit_image=decode_image
)


async def test_image_probe_has_an_image_inside_its_frame_and_compares_the_ids_after_it() -> None:
    requests: list[tuple[Sequence[int], Sequence[Image]]] = []

    def compute_logprobs(ids: Sequence[int], images: Sequence[Image]) -> list[float]:
        requests.append((ids, images))
        return reads(weights(1))(ids)

    fake = Fake(sees=(4,))
    async with (
        serving(fake) as urls,
        SGLangEngine(
            urls, TensorSync(), reference=TrainerReference(compute_logprobs, image_processor=PROCESSOR)
        ) as engine,
    ):
        await engine.publish(weights(1), 1)
        assert engine.agreement is not None and engine.agreement.is_exact
    (text_ids, no_images), (ids, (image,)) = requests
    assert (
        not no_images and ids[16:19] == (37, 39, 38) and 5 not in text_ids and (*ids[:16], *ids[19:]) == tuple(text_ids)
    )
    (body,) = [body for body in fake.bodies("/generate") if body.get("image_data")]
    assert tuple(body["input_ids"]) == ids and media_from_data_uri(body["image_data"][0]) == image


async def test_server_with_other_image_logprobs_is_refused_with_the_setting_to_change() -> None:
    fake = Fake(sees=(4,), blur=0.05)
    reference = TrainerReference(reads(weights(1)), image_processor=PROCESSOR)
    async with serving(fake) as urls, SGLangEngine(urls, TensorSync(), reference=reference) as engine:
        with pytest.raises(
            EngineError, match=rf"by up to 0.05 nats; only image logprobs differ.*{VISION_CACHE_VARIABLE}=0"
        ):
            await engine.publish(weights(1), 1)


async def test_server_that_retokenises_ids_beside_an_image_is_refused() -> None:
    reference = TrainerReference(reads(weights(1)), image_processor=PROCESSOR)
    async with (
        serving(Fake(sees=(4,), encodes_anew=True)) as urls,
        SGLangEngine(urls, TensorSync(), reference=reference) as engine,
    ):
        with pytest.raises(EngineError, match="reads other ids than it was sent, beside an image"):
            await engine.publish(weights(1), 1)


async def test_weights_are_published_under_their_checkpoint_names() -> None:
    fake = Fake(weights={f"{NAME}.of.files": weights(0)[NAME], NAME: weights(0)[NAME]})
    reference = TrainerReference(
        checkpoint_tensors=lambda given: {f"{name}.of.files": value for name, value in given.items()}
    )
    async with serving(fake) as urls, SGLangEngine(urls, TensorSync(), reference=reference) as engine:
        await engine.publish(weights(1), 1)
    assert fake.weights[f"{NAME}.of.files"].equal(weights(1)[NAME]) and fake.weights[NAME].equal(weights(0)[NAME])
