"""Tests of image conversion: bit depths, value ranges, transparency, orientation, and images that are refused."""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image as Pillow
from PIL.ExifTags import Base as Tag

from gateway.media.image import PILImage, decode_image, encode_png, open_image, to_pil_image, to_rgb
from gateway.media.media_filter import MediaFilter
from gateway.media.process import process_image
from gateway.media.sniff import MediaError
from gateway.types import Image
from tests.sample_images import decode, encode, plain_image, truncated_png

SIXTEEN_BITS = np.arange(65_536, dtype=np.uint16).reshape(256, 256)


def grey_levels(image: PILImage) -> list[int]:
    """The values of a grey RGB image."""
    red, green, blue = np.moveaxis(np.asarray(image), 2, 0)
    assert np.array_equal(red, green) and np.array_equal(red, blue)
    return [int(level) for level in red.flatten()]


def rotated_photo(width: int, height: int, orientation: int = 6) -> bytes:
    """A JPEG whose EXIF orientation rotates it."""
    exif = Pillow.Exif()
    exif[Tag.Orientation] = orientation
    return encode(plain_image(width, height), "JPEG", exif=exif)


@pytest.mark.parametrize("convert", [to_rgb, process_image])
def test_16_bit_images_keep_their_upper_8_bits(convert: Callable[[PILImage], PILImage]) -> None:
    upper = [level >> 8 for level in range(65_536)]
    ramp = Pillow.fromarray(SIXTEEN_BITS)
    for image in (ramp, open_image(encode(ramp, "PNG")), Pillow.fromarray(SIXTEEN_BITS.astype(np.int32))):
        assert grey_levels(convert(image)) == upper
    assert grey_levels(convert(Pillow.new("I;16B", (1, 1)))) == [0]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (np.array([[0, 0.5, 1]], np.float32), [0, 128, 255]),
        (np.array([[0, 63.7, 255]], np.float32), [0, 64, 255]),
        (np.array([[0, 64, 255]], np.int32), [0, 64, 255]),
        (np.array([[0, 64, 256]], np.int32), [0, 0, 1]),
    ],
)
def test_wide_values_are_converted_as_those_of_arrays(values: np.ndarray, expected: list[int]) -> None:
    assert grey_levels(to_rgb(Pillow.fromarray(values))) == expected
    assert grey_levels(to_rgb(decode(encode_png(Pillow.fromarray(values)).data))) == expected


@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0, 300.0])
def test_values_out_of_range_are_refused(value: float) -> None:
    image = Pillow.new("F", (30, 20), 0.5)
    image.putpixel((3, 2), value)
    with pytest.raises(MediaError, match=r"^values from .*; an image has 0 to 255, or 0 to 1"):
        to_rgb(image)


@given(orientation=st.integers(0, 9))
def test_exif_orientation_is_applied_once(orientation: int) -> None:
    size = (20, 30) if orientation in range(5, 9) else (30, 20)
    photo = open_image(rotated_photo(30, 20, orientation))
    rgb = to_rgb(photo)
    assert rgb.size == to_rgb(rgb).size == decode(encode_png(photo).data).size == size


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: decode(truncated_png()), "not a readable image: .*truncated"),
        (lambda: Pillow.new("RGB", (0, 0)), "not a readable image: its size is 0x0"),
        (lambda: to_pil_image(np.zeros((0, 10, 3))), "an array of shape .0, 10, 3. is not an image"),
        (lambda: to_pil_image(np.float64(1.5)), r"an array of shape \(\) is not an image"),
        (lambda: to_pil_image(np.arange(5, dtype=np.uint8)), r"an array of shape \(5,\) is not an image"),
    ],
)
def test_an_image_that_cannot_be_decoded_is_refused(make: Callable[[], PILImage], message: str) -> None:
    with pytest.raises(MediaError, match=f"(?i){message}"):
        encode_png(make())


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


@pytest.mark.parametrize(
    "profile",
    [
        _chunk(b"iCCP", b"no end of the name"),
        _chunk(b"iCCP", b"name\0\x05unknown compression"),
        _chunk(b"iCCP", b"name\0\0" + zlib.compress(bytes(3 * 2**20))),
        _chunk(b"iCCP", b"")[:-1] + b"\0",
        _chunk(b"sRGB", b""),
        _chunk(b"cHRM", b"short"),
    ],
)
async def test_png_of_which_only_the_colour_profile_is_bad_is_shown_without_it(profile: bytes) -> None:
    good = encode_png(Pillow.new("RGB", (4, 3), (10, 20, 30))).data
    after_header = good.index(b"IHDR") + 4 + 13 + 4
    bad = good[:after_header] + profile + good[after_header:]
    assert decode_image(open_image(bad)).getpixel((0, 0)) == (10, 20, 30)
    assert await MediaFilter().filter_parts((Image(bad),)) == ((Image(good),), 0)
