"""A picture is seen as its maker saw it, in whatever numbers it is written; one that cannot be is refused."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image as Pillow
from PIL.ExifTags import Base as Tag

from gateway.config.models import MediaLimits
from gateway.media.admit import Admission
from gateway.media.kind import MediaError
from gateway.media.picture import Picture, encoded, of_value, opaque, opened
from gateway.media.process import process_image, process_video
from gateway.types import Image
from tests.drawn import plain, png, saved, seen, truncated

SIXTEEN_BITS = np.arange(65_536, dtype=np.uint16).reshape(256, 256)


def levels(picture: Picture) -> list[int]:
    """Of a picture in shades of grey."""
    red, green, blue = np.moveaxis(np.asarray(picture), 2, 0)
    assert np.array_equal(red, green) and np.array_equal(red, blue)
    return [int(level) for level in red.flatten()]


def turned(width: int, height: int, orientation: int = 6) -> bytes:
    """A photograph, wide as it lies, of a camera that was held upright."""
    exif = Pillow.Exif()
    exif[Tag.Orientation] = orientation
    return saved(plain(width, height), "JPEG", exif=exif)


@pytest.mark.parametrize("see", [opaque, process_image])
def test_of_sixteen_bits_the_upper_eight_are_seen(see: Callable[[Picture], Picture]) -> None:
    upper = [level >> 8 for level in range(65_536)]
    ramp = Pillow.fromarray(SIXTEEN_BITS)
    for picture in (ramp, opened(saved(ramp, "PNG")), Pillow.fromarray(SIXTEEN_BITS.astype(np.int32))):
        assert levels(see(picture)) == upper
    assert levels(see(Pillow.new("I;16B", (1, 1)))) == [0]


@pytest.mark.parametrize(
    ("numbers", "shown"),
    [
        (np.array([[0, 0.5, 1]], np.float32), [0, 128, 255]),
        (np.array([[0, 63.7, 255]], np.float32), [0, 64, 255]),
        (np.array([[0, 64, 255]], np.int32), [0, 64, 255]),
        (np.array([[0, 64, 256]], np.int32), [0, 0, 1]),
    ],
)
def test_wide_numbers_are_seen_as_those_of_an_array_are(numbers: np.ndarray, shown: list[int]) -> None:
    assert levels(opaque(Pillow.fromarray(numbers))) == shown
    assert levels(opaque(seen(encoded(Pillow.fromarray(numbers)).data))) == shown


@pytest.mark.parametrize("amiss", [math.nan, math.inf, -1.0, 300.0])
def test_numbers_that_are_no_shade_are_refused(amiss: float) -> None:
    picture = Pillow.new("F", (30, 20), 0.5)
    picture.putpixel((3, 2), amiss)
    with pytest.raises(MediaError, match=r"^values from .* where a picture has 0 to 255, or 0 to 1"):
        opaque(picture)


@pytest.mark.parametrize("mode", ["L", "RGB", "RGBA"])
def test_what_shines_through_is_white_wherever_it_is_said(mode: str) -> None:
    told: dict[str, object] = {"L": {"transparency": 0}, "RGB": {"transparency": (0, 0, 0)}}.get(mode, {})
    assert levels(opaque(seen(saved(Pillow.new(mode, (1, 1), 0), "PNG", **told)))) == [255]


@given(orientation=st.integers(0, 9))
def test_a_photograph_is_seen_upright_and_stays_so(orientation: int) -> None:
    sides = (20, 30) if orientation in range(5, 9) else (30, 20)
    photograph = opened(turned(30, 20, orientation))
    once = opaque(photograph)
    assert once.size == opaque(once).size == seen(encoded(photograph).data).size == sides


@pytest.mark.parametrize("form", ["PNG", "WEBP"])
def test_an_orientation_that_cannot_be_read_leaves_the_picture_as_it_lies(form: str) -> None:
    photograph = opened(saved(plain(30, 20), form, exif=b"nonsense"))
    assert opaque(photograph).size == seen(encoded(photograph).data).size == (30, 20)


def test_a_photograph_is_resized_as_it_stands() -> None:
    (small,) = Admission(MediaLimits(max_pixels=28 * 28 * 16)).admitted([Image(turned(1000, 500), "image/jpeg")]).parts
    assert isinstance(small, Image) and seen(small.data).size == (56, 140)
    assert process_image({"image": turned(1000, 500), "max_pixels": 28 * 28 * 16}).size == (56, 140)
    (first, _) = process_video({"video": [turned(1000, 500)] * 2, "max_pixels": 28 * 28 * 16})
    assert first.size == (56, 140)


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (lambda: seen(truncated()), "not a readable picture: .*truncated"),
        (lambda: Pillow.new("RGB", (0, 0)), "not a readable picture: it is 0x0"),
        (lambda: of_value(np.zeros((0, 10, 3))), "an array of shape .0, 10, 3. that is no picture"),
        (lambda: of_value(np.float64(1.5)), r"an array of shape \(\) that is no picture"),
        (lambda: of_value(np.arange(5, dtype=np.uint8)), r"an array of shape \(5,\) that is no picture"),
    ],
)
def test_a_picture_that_cannot_be_written_says_why(made: Callable[[], Picture], words: str) -> None:
    with pytest.raises(MediaError, match=f"(?i){words}"):
        encoded(made())


def test_a_picture_that_an_encoder_refuses_says_why() -> None:
    picture = plain()
    picture.info["transparency"] = "blue"
    with pytest.raises(MediaError, match="a picture that cannot be written as PNG: "):
        encoded(picture)


def test_a_picture_keeps_the_numbers_that_png_has() -> None:
    ramp = Pillow.fromarray(SIXTEEN_BITS)
    assert np.array_equal(np.asarray(seen(encoded(ramp).data)), SIXTEEN_BITS)
    assert encoded(plain()) == Image(png())
