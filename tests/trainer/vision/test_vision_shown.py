"""A picture is brought to a size that its model takes by one hand alone: whoever looks after that changes nothing."""

from __future__ import annotations

import functools
import json
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.media.picture import encoded
from tests.trainer.vision.seeing import KINDS, PATCH, picture, seeing_model
from trainer.vision.eyes import Eyes, SightError, seen

SIDES = st.integers(1, 90)


@functools.cache
def eyes(kind: str) -> Eyes:
    with tempfile.TemporaryDirectory() as folder:
        made = Eyes.load(seeing_model(Path(folder), kind, patch=PATCH))
    assert made is not None
    return made


@pytest.mark.parametrize("kind", KINDS)
@given(width=SIDES, height=SIDES)
def test_what_is_shown_is_left_as_it_is_by_any_processor(kind: str, width: int, height: int) -> None:
    image = picture(0, width, height)
    shown = eyes(kind).shown(image)
    again = eyes(kind).shown(encoded(shown))
    assert again.size == shown.size and again.tobytes() == shown.tobytes()
    (grid,) = eyes(kind)._processor.preprocess(images=[shown], return_tensors="pt")["image_grid_thw"]
    assert shown.size == (int(grid[2]) * PATCH, int(grid[1]) * PATCH)


@given(width=SIDES, height=SIDES)
def test_the_pixels_are_those_of_the_models_own_processor(width: int, height: int) -> None:
    """Of pictures that it brings to their size at once, which are all but those that are like lines."""
    looked = eyes("qwen2_5_vl")
    image = picture(0, width, height)
    own = looked._processor.preprocess(images=[seen(image)], return_tensors="pt")
    sides = looked.shown(image).size
    if looked.family.sides(looked._processor, width, height) == sides:
        assert looked.look(image).pixels.equal(own["pixel_values"])


def test_a_picture_with_no_size_that_the_model_takes_is_told() -> None:
    with pytest.raises(SightError, match="the model cannot be shown it"):
        eyes("qwen2_5_vl").shown(picture(0, 2000, 1))


@pytest.mark.parametrize("sides", [(640, 480), (32, 20)])
def test_where_no_size_is_left_as_it_is_the_processor_has_the_picture_as_it_came(
    sides: tuple[int, int], tmp_path: Path
) -> None:
    """As with bounds that leave no room: each size that it finds is brought to another one."""
    folder = seeing_model(tmp_path, "qwen2_5_vl")
    told = json.loads((folder / "preprocessor_config.json").read_text())
    narrow = {"size": {"shortest_edge": 64 * PATCH**2, "longest_edge": 64 * PATCH**2}}
    (folder / "preprocessor_config.json").write_text(json.dumps(told | narrow))
    looked = Eyes.load(folder)
    assert looked is not None
    image = picture(0, *sides)
    own = looked._processor.preprocess(images=[seen(image)], return_tensors="pt")
    assert looked.shown(image).size == sides and looked.look(image).pixels.equal(own["pixel_values"])
