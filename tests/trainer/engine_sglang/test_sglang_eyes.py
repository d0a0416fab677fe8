"""Servers of a model that sees are held against the trainer with a picture, too: ids alone tell nothing of its eyes."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from gateway.media.kind import of_data_uri
from gateway.types import Image
from tests.trainer.engine_sglang.asked import serving
from tests.trainer.engine_sglang.fake_sglang import NAME, Fake, reads, weights
from trainer.engine.base import EngineError
from trainer.engine.sglang.engine import SGLangEngine
from trainer.engine.sglang.environment import SIGHT, environment
from trainer.engine.sglang.own import Own
from trainer.engine.sglang.publish.tensors import ByTensors
from trainer.vision.eyes import seen

EYES: Any = SimpleNamespace(family=SimpleNamespace(image=39, frame=((37,), (38,)), barred=(5, 37, 38, 39)), shown=seen)


async def test_the_probe_of_eyes_is_a_picture_at_its_place_and_what_follows_is_compared() -> None:
    asked: list[tuple[Sequence[int], Sequence[Image]]] = []

    def finds(ids: Sequence[int], images: Sequence[Image]) -> list[float]:
        asked.append((ids, images))
        return reads(weights(1))(ids)

    fake = Fake(sees=(4,))
    async with serving(fake) as urls, SGLangEngine(urls, ByTensors(), own=Own(finds, eyes=EYES)) as engine:
        await engine.publish(weights(1), 1)
        assert engine.agreement is not None and engine.agreement.exact
    (words, none), (ids, (image,)) = asked
    assert not none and ids[16:19] == (37, 39, 38) and 5 not in words and (*ids[:16], *ids[19:]) == tuple(words)
    (body,) = [body for body in fake.bodies("/generate") if body.get("image_data")]
    assert tuple(body["input_ids"]) == ids and of_data_uri(body["image_data"][0]) == image


async def test_a_server_that_sees_otherwise_than_the_trainer_is_told_with_what_to_turn() -> None:
    fake = Fake(sees=(4,), blur=0.05)
    own = Own(reads(weights(1)), eyes=EYES)
    async with serving(fake) as urls, SGLangEngine(urls, ByTensors(), own=own) as engine:
        with pytest.raises(EngineError, match=rf"by up to 0.05 nats; it reads as the trainer does.*{SIGHT}=0"):
            await engine.publish(weights(1), 1)


async def test_a_server_that_encodes_anew_what_stands_beside_a_picture_is_told() -> None:
    own = Own(reads(weights(1)), eyes=EYES)
    async with serving(Fake(sees=(4,), encodes_anew=True)) as urls, SGLangEngine(urls, ByTensors(), own=own) as engine:
        with pytest.raises(EngineError, match="reads other ids than it was given, beside a picture"):
            await engine.publish(weights(1), 1)


async def test_who_is_shown_no_pictures_is_asked_about_none() -> None:
    """As where a model that sees is served without its tokenizer."""
    own, fake = Own(reads(weights(1)), eyes=EYES), Fake(blur=1.0)
    async with serving(fake) as urls, SGLangEngine(urls, ByTensors(), own=own) as engine:
        await engine.publish(weights(1), 1)
        assert engine.capabilities.exact and not engine.capabilities.images
    assert not any(body.get("image_data") for body in fake.bodies("/generate"))


async def test_servers_are_given_weights_by_the_names_that_files_have() -> None:
    fake = Fake(weights={f"{NAME}.of.files": weights(0)[NAME], NAME: weights(0)[NAME]})
    own = Own(filed=lambda given: {f"{name}.of.files": value for name, value in given.items()})
    async with serving(fake) as urls, SGLangEngine(urls, ByTensors(), own=own) as engine:
        await engine.publish(weights(1), 1)
    assert fake.weights[f"{NAME}.of.files"].equal(weights(1)[NAME]) and fake.weights[NAME].equal(weights(0)[NAME])


async def test_of_a_server_that_is_not_ours_it_is_said_how_it_should_have_been_started() -> None:
    async with serving(Fake(sees=(4,)), Fake()) as (seeing, blind):
        async with SGLangEngine([seeing], ByTensors()) as engine:
            assert any(f"{SIGHT}=0" in note for note in engine.capabilities.notes)
        async with SGLangEngine([blind], ByTensors()) as engine:
            assert not any(SIGHT in note for note in engine.capabilities.notes)


def test_ours_keep_nothing_of_what_was_seen_unless_somebody_wants_them_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SIGHT, raising=False)
    assert environment()[SIGHT] == "0"
    monkeypatch.setenv(SIGHT, "50")
    assert environment()[SIGHT] == "50"
