"""Tests of the conversion of tool results to parts: media in all forms, notes for refused ones, structured data."""

from __future__ import annotations

import base64
import io
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image as Pillow

from gateway.media import MediaError, media_from_bytes, sniff, to_data_uri, to_media, to_parts
from gateway.media.sniff import read_image_size
from gateway.media.to_parts import convert_value
from gateway.native.base import ToolResponse
from gateway.types import Audio, Image, Part, Resource, Text, Video
from tests.sample_images import decode, plain_image, png


class ArrayLike:
    """An object with only the array interface."""

    def __init__(self) -> None:
        self.data = bytes(2 * 3 * 3)
        self.__array_interface__ = {"shape": (3, 2, 3), "typestr": "|u1", "strides": (6, 3, 1), "version": 3}

    def tobytes(self) -> bytes:
        return self.data


def test_an_image_can_be_bytes_path_uri_array_or_pil(tmp_path: Path) -> None:
    file = tmp_path / "a.png"
    file.write_bytes(png())
    uri = f"data:image/png;base64,{base64.b64encode(png()).decode()}"
    for value in (png(), bytearray(png()), file, str(file), uri, Pillow.new("CMYK", (2, 3)), ArrayLike()):
        medium = to_media(value)
        assert isinstance(medium, Image) and read_image_size(medium.data) == (2, 3)


@pytest.mark.parametrize(
    ("data", "kind", "mime"),
    [
        (b"\xff\xd8\xff\xe0", Image, "image/jpeg"),
        (b"RIFF\x00\x00\x00\x00WAVE", Audio, "audio/wav"),
        (b"\x00\x00\x00\x18ftypisom", Video, "video/mp4"),
    ],
)
def test_the_type_comes_from_the_content_not_from_the_declaration(data: bytes, kind: type, mime: str) -> None:
    medium = media_from_bytes(data, "image/png")
    assert isinstance(medium, kind) and medium.mime == mime == sniff(data)


def test_content_parts_of_chat_messages_are_converted() -> None:
    uri = to_data_uri(Image(png()))
    sound = base64.b64encode(b"RIFF").decode()
    parts = to_parts(
        [
            {"type": "image_url", "image_url": {"url": uri}},
            {"type": "image_url", "image_url": {"url": "https://example.org/a.png"}},
            {"type": "input_audio", "input_audio": {"data": sound, "format": "mp3"}},
        ]
    )
    assert parts == (Image(png()), Resource("https://example.org/a.png", "image/*"), Audio(b"RIFF", "audio/mp3"))


RAMP = np.arange(4 * 5 * 3, dtype=np.uint8).reshape(4, 5, 3)
"""Four rows, five columns, three channels."""


@pytest.mark.parametrize(
    "array",
    [
        RAMP,
        RAMP.transpose(2, 0, 1),
        RAMP.astype(np.int64),
        RAMP.astype(np.float32),
        (RAMP / 255).astype(np.float32).transpose(2, 0, 1),
        torch.tensor(RAMP),
        torch.tensor(RAMP / 255, requires_grad=True),
    ],
    ids=lambda array: f"{type(array).__name__} {array.dtype} {array.shape}",
)
def test_arrays_of_all_types_and_channel_orders_become_the_same_image(array: Any) -> None:
    assert np.array_equal(np.asarray(decode(to_media(array).data)), RAMP)


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.full((2, 2), np.nan), "values from nan to nan"),
        (np.zeros((2, 2, 2, 2, 2)), "is not an image: it needs rows and columns"),
        (np.zeros((7, 9, 5)), "is not an image: "),
    ],
)
def test_an_array_that_is_no_image_is_refused(array: Any, message: str) -> None:
    with pytest.raises(MediaError, match=message):
        to_media(array)


def test_paths_of_devices_folders_and_invalid_names_are_not_read() -> None:
    for path in ("/dev/zero", "/", "x" * 5000, "a\0b"):
        (part,) = convert_value(ToolResponse(image=[path])).parts
        assert isinstance(part, Text) and part.text.startswith("[image left out:")


@pytest.mark.parametrize(
    "part_json",
    [
        {"type": "image", "image": "/etc/hostname"},
        {"type": "image_url", "image_url": {"url": "file:///etc/hostname"}},
        {"type": "image_url", "image_url": "/etc/hostname"},
        {"type": "video", "video": ["/etc/hostname"]},
        {"type": "video_url", "video_url": {"url": "/etc/hostname"}},
    ],
)
def test_no_content_part_opens_a_file(part_json: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(file: Path) -> bytes:
        raise AssertionError(f"{file} was read")

    monkeypatch.setattr(Path, "read_bytes", fail)
    (part,) = to_parts([part_json])
    assert isinstance(part, Text | Resource) and "/etc/hostname" in str(part)


RED, BLUE = png(), png(color="blue")
URI = to_data_uri(Image(RED))


@dataclass
class Chart:
    caption: str
    image: Any


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (np.float64(1.75), "1.75"),
        (np.int64(3), "3"),
        (np.bool_(True), "true"),
        (np.str_("three"), "three"),
        ([np.float64(1.5), np.float32(2)], "[1.5, 2.0]"),
        (np.array([[1.5, 2], [3, 4]]), "[[1.5, 2.0], [3.0, 4.0]]"),
        (np.arange(10).reshape(2, 1, 5), "[[[0, 1, 2, 3, 4]], [[5, 6, 7, 8, 9]]]"),
        (np.zeros((0, 3), np.uint8), "[]"),
        ({"n": np.int64(3), "mean": torch.tensor(0.5, requires_grad=True)}, '{"n": 3, "mean": 0.5}'),
        (torch.arange(3, dtype=torch.uint8), "[0, 1, 2]"),
        (torch.tensor([[0.5, -1.0]]).bfloat16(), "[[0.5, -1.0]]"),
    ],
)
def test_numbers_of_numpy_and_torch_become_json_numbers(value: Any, text: str) -> None:
    assert convert_value(value) == ((Text(text),), 0, None if text == "three" else json.loads(text))


@pytest.mark.parametrize(
    ("value", "structured", "media"),
    [
        ({"caption": "bars", "image": plain_image()}, {"caption": "bars", "image": "[image 1]"}, (Image(RED),)),
        (Chart("bars", io.BytesIO(RED)), {"caption": "bars", "image": "[image 1]"}, (Image(RED),)),
        ({"charts": (Chart("a", Image(RED)),)}, {"charts": [{"caption": "a", "image": "[image 1]"}]}, (Image(RED),)),
        ({"at": URI, "was": f"{URI} here"}, {"at": "[image 1]", "was": f"{URI} here"}, (Image(RED),)),
        ({"raw": bytearray(b"hello"), "held": memoryview(b"a")}, {"raw": "b'hello'", "held": "b'a'"}, ()),
        (
            {"sound": Audio(b"a"), "page": Resource("a", data=b"a"), "two": [plain_image(), plain_image()]},
            {"sound": "[audio 1]", "page": "[resource 1]", "two": ["[image 1]", "[image 2]"]},
            (Audio(b"a"), Resource("a", data=b"a"), Image(RED), Image(RED)),
        ),
    ],
)
def test_nested_media_are_replaced_by_placeholders_and_follow_the_text(
    value: Any, structured: Any, media: tuple[Part, ...]
) -> None:
    assert convert_value(value) == ((Text(json.dumps(structured)), *media), 0, structured)


NESTED_VALUES = st.recursive(
    st.sampled_from([1, "a", None, plain_image(), RED, URI, np.float64(0.5), np.zeros((3, 2), np.uint8), Image(RED)]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
)


@given(value=NESTED_VALUES)
def test_no_text_has_addresses_or_reprs_of_media(value: Any) -> None:
    parts, refused, _ = convert_value({"all": value})
    text = " ".join(part.text for part in parts if isinstance(part, Text))
    assert refused == 0 and "0x" not in text and "base64" not in text and "PIL" not in text
    assert text.count("[image ") == sum(isinstance(part, Image) for part in parts)
