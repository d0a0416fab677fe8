"""The torch engine with images: logprobs equal the model's, and prefixes are shared by content."""

from __future__ import annotations

from pathlib import Path
from random import Random

import anyio
import pytest

from gateway.types import Image
from tests.trainer.vision.vision_models import engine_of, loaded, logprobs, picture
from trainer.engine.base import EngineError, Generation, Sampling
from trainer.template import Template
from trainer.vision.image_processor import ImageProcessor

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


async def test_decoding_ahead_goes_on_after_images(kind: Path) -> None:
    eyes = eyes_of(kind)
    ids, images = prompt(eyes, 2), [picture(1), picture(2)]
    with anyio.fail_after(60):
        async with engine_of(kind, deterministic=False, steps_ahead=8) as engine:
            written = await engine.generate(ids, SHORT, images=images)
    assert written.ids == (await write(kind, ids, images)).ids
    own = logprobs(kind, eyes, (*ids, *written.ids), images)[-len(written.ids) :]
    assert list(written.logprobs) == pytest.approx(own, abs=1e-4)


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


@pytest.mark.parametrize(("places", "images"), [(1, 0), (0, 1), (2, 1)])
async def test_images_and_placeholders_must_match(sees: Path, places: int, images: int) -> None:
    ids = prompt(eyes_of(sees), places)
    with pytest.raises(EngineError, match=f"{images} images for ids with {places} placeholders"):
        await write(sees, ids, [picture(number) for number in range(images)])
