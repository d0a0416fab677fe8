"""The torch engine with images: logprobs equal the model's, and prefixes are shared by content."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random

import anyio
import pytest
import torch

from gateway.media.image import encode_png
from gateway.types import Image
from tests.trainer.vision.vision_models import engine_of, loaded, logprobs, odd_pictures, picture
from trainer.engine.base import EngineError, Generation, Sampling
from trainer.engine.torch import TorchEngine
from trainer.template import Template
from trainer.vision.image_processor import ImageProcessor, decode_image

SHORT = Sampling(max_tokens=12, seed=1)


def prompt(eyes: ImageProcessor, count: int, seed: int = 0) -> tuple[int, ...]:
    """Words, with as many places for pictures among them: first, last, side by side."""
    draw = Random(seed)
    image, _, begin, end = eyes.family.banned_ids
    words: list[list[int]] = [[draw.randrange(200)] for _ in range(20)]
    for place in [0, 0, 9, 20, 22][:count]:
        words.insert(place, [begin, image, end])
    return tuple(token for word in words for token in word)


def eyes_of(folder: Path) -> ImageProcessor:
    eyes = Template.load(folder).image_processor
    assert eyes is not None
    return eyes


async def write(folder: Path, ids: tuple[int, ...], images: list[Image]) -> Generation:
    with anyio.fail_after(60):
        async with engine_of(folder) as engine:
            return await engine.generate(ids, SHORT, images=images)


@pytest.mark.parametrize("count", [0, 1, 2, 5])
async def test_logprobs_equal_the_models_with_images_anywhere(kind: Path, count: int) -> None:
    eyes = eyes_of(kind)
    ids, images = prompt(eyes, count), [picture(number, 8 + 8 * number, 16) for number in range(count)]
    written = await write(kind, ids, images)
    own = logprobs(kind, eyes, (*ids, *written.ids), images)
    assert list(written.logprobs) == pytest.approx(own[-len(written.ids) :], abs=1e-5)
    assert written.prompt_tokens == len(eyes.prepare_prompt(ids, images).ids) == len(own) + 1 - len(written.ids)


def test_images_are_rotated_upright_and_flattened_on_white(sees: Path) -> None:
    eyes = eyes_of(sees)
    for name, odd in odd_pictures().items():
        found, meant = eyes.prepare(odd), eyes.prepare(encode_png(decode_image(odd)))
        assert found.grid == meant.grid and torch.equal(found.pixels, meant.pixels), name


async def test_prefix_cache_distinguishes_images_by_content(sees: Path) -> None:
    """Placeholder ids are the same for both: only the content tells them apart."""
    eyes = eyes_of(sees)
    ids, one, other = prompt(eyes, 1), picture(1), picture(2)
    at = eyes.prepare_prompt(ids, [one]).images[0][0]
    with anyio.fail_after(60):
        async with engine_of(sees) as engine:
            first = await engine.generate(ids, SHORT, images=[one])
            second = await engine.generate(ids, SHORT, images=[other])
            again = await engine.generate(ids, SHORT, images=[Image(bytes(one.data), "image/png")])
    assert second.cached_tokens <= at < again.cached_tokens
    assert second.logprobs != first.logprobs and again.logprobs == first.logprobs
    for written, shown in ((first, one), (second, other)):
        own = logprobs(sees, eyes, (*ids, *written.ids), [shown])[-len(written.ids) :]
        assert list(written.logprobs) == pytest.approx(own, abs=1e-5)


async def test_generation_does_not_depend_on_other_sequences_images(kind: Path) -> None:
    """To the bit, however rows with pictures and without come together, and wherever a long prompt is cut."""
    eyes = eyes_of(kind)
    asks = [
        (prompt(eyes, count, seed=count), [picture(number, 64, 64) for number in range(count)]) for count in (0, 2, 5)
    ]
    apart = [await write(kind, *ask) for ask in asks]
    together: dict[int, Generation] = {}
    with anyio.fail_after(60):
        async with engine_of(kind, max_sequences=2) as engine, anyio.create_task_group() as tasks:

            async def one(place: int) -> None:
                together[place] = await engine.generate(asks[place][0], SHORT, images=asks[place][1])

            for place in range(len(asks)):
                tasks.start_soon(one, place)
    assert [together[place].ids for place in range(3)] == [written.ids for written in apart]
    assert [together[place].logprobs for place in range(3)] == [written.logprobs for written in apart]


async def test_published_vision_weights_take_effect(kind: Path) -> None:
    eyes = eyes_of(kind)
    ids, shown = prompt(eyes, 2), [picture(1), picture(2)]
    model = loaded(kind)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    name = next(name for name in weights if "visual" in name and "merger" in name and name.endswith("weight"))
    weights[name] *= 1.5
    with anyio.fail_after(60):
        async with engine_of(kind) as engine:
            before = await engine.generate(ids, SHORT, images=shown)
            with pytest.raises(EngineError, match=r"1 missing, as 'model\.visual"):
                await engine.publish({key: value for key, value in weights.items() if key != name}, 1)
            await engine.publish(weights, 1)
            after = await engine.generate(ids, SHORT, images=shown)
            await engine.publish(model.state_dict(), 2)
            back = await engine.generate(ids, SHORT, images=shown)
    assert after.logprobs != before.logprobs and back.logprobs == before.logprobs


async def test_image_is_prepared_once_for_all_turns_and_siblings(sees: Path) -> None:
    eyes = eyes_of(sees)
    with anyio.fail_after(60):
        async with TorchEngine(loaded(sees), image_processor=eyes) as engine:
            for count in (1, 2, 2):
                await engine.generate(prompt(eyes, count), SHORT, images=[picture(number) for number in range(count)])
    assert eyes.processed_count == 2


@pytest.mark.parametrize(("places", "images"), [(1, 0), (0, 1), (2, 1)])
async def test_images_and_placeholders_must_match(sees: Path, places: int, images: int) -> None:
    ids = prompt(eyes_of(sees), places)
    with pytest.raises(EngineError, match=f"{images} images for ids with {places} placeholders"):
        await write(sees, ids, [picture(number) for number in range(images)])


async def test_images_that_fill_the_context_are_refused(sees: Path) -> None:
    eyes = eyes_of(sees)
    images = [picture(number, 64, 64) for number in range(70)]
    _, _, begin, end = eyes.family.banned_ids
    ids = tuple(token for _ in images for token in (begin, eyes.family.image_id, end))
    with pytest.raises(EngineError, match="4620 ids leave no room"):
        await write(sees, ids, images)


async def test_image_ids_are_never_sampled(sees: Path) -> None:
    """However likely they are."""
    eyes = eyes_of(sees)
    barred = eyes.family.banned_ids
    weights = {name: value.clone() for name, value in loaded(sees).state_dict().items()}
    embed = "model.language_model.embed_tokens.weight"
    weights[embed][list(barred)] = weights[embed].mean(0) + 3 * torch.randn(len(barred), weights[embed].shape[1])
    weights["lm_head.weight"] = weights[embed]
    with anyio.fail_after(60):
        async with engine_of(sees) as engine:
            await engine.publish(weights, 1)
            ids = prompt(eyes, 1)
            free = [
                await engine.generate(ids, Sampling(max_tokens=40, seed=seed), images=[picture()]) for seed in range(4)
            ]
            kept = Sampling(max_tokens=40, banned_ids=barred)
            held = [await engine.generate(ids, replace(kept, seed=seed), images=[picture()]) for seed in range(4)]
    assert any(token in barred for written in free for token in written.ids)
    assert not any(token in barred for written in held for token in written.ids)
