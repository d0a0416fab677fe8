"""Tests of type detection and image headers, with hostile data."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.media.image import MAX_PIXELS, decode_image, open_image
from gateway.media.sniff import MediaError, read_image_size, sniff
from tests.sample_images import SVG, animation, decompression_bomb, encode, plain_image

SIDES = st.integers(1, 300)
ENCODERS = {
    "png": lambda image: encode(image, "PNG"),
    "gif": lambda image: encode(image, "GIF"),
    "bmp": lambda image: encode(image, "BMP"),
    "jpeg": lambda image: encode(image, "JPEG"),
    "progressive": lambda image: encode(image, "JPEG", progressive=True, exif=b"Exif\0\0" + bytes(5000)),
    "webp": lambda image: encode(image, "WEBP"),
    "lossless": lambda image: encode(image, "WEBP", lossless=True),
    "alpha": lambda image: encode(image.convert("RGBA"), "WEBP", exif=b"Exif\0\0"),
}


@settings(max_examples=40, deadline=None)
@given(encoder=st.sampled_from(sorted(ENCODERS)), width=SIDES, height=SIDES)
def test_the_header_size_is_the_decoded_size(encoder: str, width: int, height: int) -> None:
    data = ENCODERS[encoder](plain_image(width, height))
    assert read_image_size(data) == (width, height) == decode_image(open_image(data)).size


VALID_IMAGES = [encoder(plain_image(30, 20)) for encoder in ENCODERS.values()] + [
    animation("WEBP"),
    animation("PNG"),
    decompression_bomb(),
    SVG,
]


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_a_damaged_image_is_decoded_within_limits_or_refused(data: st.DataObject) -> None:
    content = bytearray(data.draw(st.sampled_from(VALID_IMAGES)))
    for _ in range(data.draw(st.integers(0, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    damaged = bytes(content[: data.draw(st.integers(0, len(content)))])
    try:
        image = decode_image(open_image(damaged))
    except MediaError:
        return
    assert image.width * image.height <= MAX_PIXELS


def test_a_jpeg_of_endless_segments_is_refused() -> None:
    endless = b"\xff\xd8" + b"\xff\xe0\x00\x02" * 100_000
    with pytest.raises(MediaError, match="a JPEG without a size in its header"):
        read_image_size(endless)


def test_a_frame_larger_than_the_header_says_is_refused() -> None:
    """A GIF of 2x2 with a first frame of 65535x65535."""
    data = bytearray(encode(plain_image(2, 2), "GIF"))
    frame = data.index(b"\x2c")
    data[frame + 5 : frame + 9] = b"\xff\xff\xff\xff"
    assert read_image_size(bytes(data)) == (2, 2)
    with pytest.raises(MediaError, match=r"pixels|exceeds"):
        decode_image(open_image(bytes(data)))


@pytest.mark.parametrize(
    ("data", "mime"),
    [
        (SVG, "image/svg+xml"),
        (b"\xef\xbb\xbf<!-- a --><svg/>", "image/svg+xml"),
        (b"<?xml version='1.0'?><html/>", None),
        (b"\0\0\0\x20ftypavif", "image/avif"),
        (b"\0\0\0\x20ftypisom", "video/mp4"),
        (b"\x1aE\xdf\xa3", "video/webm"),
        (b"RIFF\0\0\0\0AVI ", "video/x-msvideo"),
        (b"<svg", "image/svg+xml"),
        (b"", None),
    ],
)
def test_the_type_is_detected_from_the_first_bytes(data: bytes, mime: str | None) -> None:
    assert sniff(data) == mime
