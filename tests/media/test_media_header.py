"""A picture's size stands in its header, and nothing of a hostile header is believed or waited for."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image as Pillow

from gateway.media.header import size
from gateway.media.kind import MediaError, of_bytes, sniff
from gateway.media.picture import MOST_PIXELS, UNWARNED_PIXELS, decoded, opened
from tests.drawn import SVG, bomb, moving, plain, saved

SIDES = st.integers(1, 300)
FORMS = {
    "png": lambda picture: saved(picture, "PNG"),
    "gif": lambda picture: saved(picture, "GIF"),
    "bmp": lambda picture: saved(picture, "BMP"),
    "jpeg": lambda picture: saved(picture, "JPEG"),
    "progressive": lambda picture: saved(picture, "JPEG", progressive=True, exif=b"Exif\0\0" + bytes(5000)),
    "webp": lambda picture: saved(picture, "WEBP"),
    "lossless": lambda picture: saved(picture, "WEBP", lossless=True),
    "alpha": lambda picture: saved(picture.convert("RGBA"), "WEBP", exif=b"Exif\0\0"),
}


@settings(max_examples=40, deadline=None)
@given(form=st.sampled_from(sorted(FORMS)), width=SIDES, height=SIDES)
def test_a_header_tells_what_a_decoder_finds(form: str, width: int, height: int) -> None:
    data = FORMS[form](plain(width, height))
    assert size(data) == (width, height) == decoded(opened(data)).size


def test_the_oldest_bitmaps_and_those_that_hang_upside_down_are_measured() -> None:
    old = b"BM" + bytes(12) + struct.pack("<IHHHH", 12, 7, 9, 1, 24)
    downward = b"BM" + bytes(12) + struct.pack("<Iii", 40, 7, -9)
    assert size(old) == size(downward) == (7, 9)


WHOLE = [make(plain(30, 20)) for make in FORMS.values()] + [moving("WEBP"), moving("PNG"), bomb(), SVG]


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_a_damaged_picture_is_measured_or_refused_and_nothing_else(data: st.DataObject) -> None:
    whole = bytearray(data.draw(st.sampled_from(WHOLE)))
    for _ in range(data.draw(st.integers(0, 4))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    damaged = bytes(whole[: data.draw(st.integers(0, len(whole)))])
    try:
        picture = decoded(opened(damaged))
    except MediaError:
        return
    assert picture.width * picture.height <= MOST_PIXELS


@given(
    data=st.binary(max_size=200), head=st.sampled_from([b"", b"\xff\xd8\xff", b"RIFF\0\0\0\0WEBP", b"GIF89a", b"BM"])
)
def test_bytes_of_chance_are_no_picture(data: bytes, head: bytes) -> None:
    try:
        width, height = size(head + data)
    except MediaError:
        return
    assert width > 0 and height > 0


def test_a_jpeg_of_segments_alone_is_given_up() -> None:
    endless = b"\xff\xd8" + b"\xff\xe0\x00\x02" * 100_000
    with pytest.raises(MediaError, match="does not tell its size"):
        size(endless)


def test_a_frame_larger_than_its_header_is_refused_as_well() -> None:
    """A GIF says 2x2, and its first frame 65535x65535."""
    data = bytearray(saved(plain(2, 2), "GIF"))
    frame = data.index(b"\x2c")
    data[frame + 5 : frame + 9] = b"\xff\xff\xff\xff"
    assert size(bytes(data)) == (2, 2)
    with pytest.raises(MediaError, match=r"pixels|exceeds"):
        decoded(opened(bytes(data)))


def test_nothing_that_we_let_in_is_a_bomb_to_pillow() -> None:
    assert Pillow.MAX_IMAGE_PIXELS is not None and UNWARNED_PIXELS <= Pillow.MAX_IMAGE_PIXELS


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
        (b"II*\0", "image/tiff"),
        (b"<svg", "image/svg+xml"),
        (b"", None),
    ],
)
def test_the_first_bytes_tell_the_type(data: bytes, mime: str | None) -> None:
    assert sniff(data) == mime


def test_a_declared_type_makes_no_picture_of_what_is_none() -> None:
    with pytest.raises(MediaError, match="none of png"):
        of_bytes(b"hello", "image/png")
