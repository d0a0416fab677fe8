"""Images are resized once, to a size that no later processor changes."""

from __future__ import annotations

import functools
import json
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.media.image import encode_png
from tests.trainer.vision.vision_models import KINDS, PATCH, picture, seeing_model
from trainer.vision.image_processor import ImageProcessor, decode_image

SIDES = st.integers(1, 90)


@functools.cache
def eyes(kind: str) -> ImageProcessor:
    with tempfile.TemporaryDirectory() as folder:
        made = ImageProcessor.load(seeing_model(Path(folder), kind, patch=PATCH))
    assert made is not None
    return made


@pytest.mark.parametrize("kind", KINDS)
@given(width=SIDES, height=SIDES)
def test_fitted_image_is_unchanged_by_every_processor(kind: str, width: int, height: int) -> None:
    image = picture(0, width, height)
    shown = eyes(kind).fit_image(image)
    again = eyes(kind).fit_image(encode_png(shown))
    assert again.size == shown.size and again.tobytes() == shown.tobytes()
    (grid,) = eyes(kind)._processor.preprocess(images=[shown], return_tensors="pt")["image_grid_thw"]
    assert shown.size == (int(grid[2]) * PATCH, int(grid[1]) * PATCH)


@given(width=SIDES, height=SIDES)
def test_pixels_equal_those_of_the_models_processor(width: int, height: int) -> None:
    """Of pictures that it brings to their size at once, which are all but those that are like lines."""
    looked = eyes("qwen2_5_vl")
    image = picture(0, width, height)
    own = looked._processor.preprocess(images=[decode_image(image)], return_tensors="pt")
    sides = looked.fit_image(image).size
    if looked.family.fit_size(looked._processor, width, height) == sides:
        assert looked.prepare(image).pixels.equal(own["pixel_values"])


@pytest.mark.parametrize("sides", [(640, 480), (32, 20)])
def test_image_is_passed_unchanged_when_no_stable_size_exists(sides: tuple[int, int], tmp_path: Path) -> None:
    """As with bounds that leave no room: each size that it finds is brought to another one."""
    folder = seeing_model(tmp_path, "qwen2_5_vl")
    told = json.loads((folder / "preprocessor_config.json").read_text())
    narrow = {"size": {"shortest_edge": 64 * PATCH**2, "longest_edge": 64 * PATCH**2}}
    (folder / "preprocessor_config.json").write_text(json.dumps(told | narrow))
    looked = ImageProcessor.load(folder)
    assert looked is not None
    image = picture(0, *sides)
    own = looked._processor.preprocess(images=[decode_image(image)], return_tensors="pt")
    assert looked.fit_image(image).size == sides and looked.prepare(image).pixels.equal(own["pixel_values"])
