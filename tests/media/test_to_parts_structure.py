"""Tests of structured data in tool results: numbers of numpy and torch, and placeholders for nested media."""

from __future__ import annotations

import io
import json
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gateway.media import to_data_uri, to_parts
from gateway.media.to_parts import convert_value, is_heavy
from gateway.types import Audio, Image, Part, Resource, Text, Video
from tests.sample_images import SVG, animation, decode, plain_image, png, truncated_png

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
        (np.float64(-3.5), "-3.5"),
        (np.int64(3), "3"),
        (np.bool_(True), "true"),
        (np.str_("three"), "three"),
        ([np.float64(1.5), np.float32(2)], "[1.5, 2.0]"),
        (np.bincount([0, 1, 1]), "[1, 2]"),
        (np.array([[1.5, 2], [3, 4]]), "[[1.5, 2.0], [3.0, 4.0]]"),
        (np.array([[1, 2]]), "[[1, 2]]"),
        (np.arange(10).reshape(2, 1, 5), "[[[0, 1, 2, 3, 4]], [[5, 6, 7, 8, 9]]]"),
        (np.zeros((0, 3), np.uint8), "[]"),
        (np.zeros((1, 1, 1, 1, 1)), "[[[[[0.0]]]]]"),
        ({"n": np.int64(3), "mean": torch.tensor(0.5, requires_grad=True)}, '{"n": 3, "mean": 0.5}'),
        (torch.tensor(2.0), "2.0"),
        (torch.arange(3, dtype=torch.uint8), "[0, 1, 2]"),
        (torch.tensor([[0.5, -1.0]]).bfloat16(), "[[0.5, -1.0]]"),
    ],
)
def test_numbers_of_numpy_and_torch_become_json_numbers(value: Any, text: str) -> None:
    assert convert_value(value) == ((Text(text),), 0, None if text == "three" else json.loads(text))


def test_arrays_shaped_like_images_become_images() -> None:
    for array in (
        np.zeros((3, 2), np.uint8),
        np.zeros((3, 2), np.uint16),
        np.zeros((3, 2), bool),
        np.zeros((3, 2, 4)),
        np.zeros((1, 3, 2)),
        torch.zeros(3, 2, dtype=torch.uint8),
        torch.zeros(3, 2, dtype=torch.bool),
        torch.zeros(3, 3, 2),
    ):
        (part,) = to_parts(array)
        assert isinstance(part, Image) and decode(part.data).size == (2, 3)
    (video,) = to_parts(np.zeros((5, 3, 2, 3), np.uint8))
    assert isinstance(video, Video)


@pytest.mark.parametrize(
    ("value", "structured", "media"),
    [
        (
            {"caption": "bars", "image": plain_image()},
            {"caption": "bars", "image": "[image 1]"},
            (Image(RED),),
        ),
        ([["a", plain_image()]], [["a", "[image 1]"]], (Image(RED),)),
        ({"images": [RED, BLUE]}, {"images": ["[image 1]", "[image 2]"]}, (Image(RED), Image(BLUE))),
        (Chart("bars", io.BytesIO(RED)), {"caption": "bars", "image": "[image 1]"}, (Image(RED),)),
        ({"charts": (Chart("a", Image(RED)),)}, {"charts": [{"caption": "a", "image": "[image 1]"}]}, (Image(RED),)),
        ({"type": "image", "shows": plain_image()}, {"type": "image", "shows": "[image 1]"}, (Image(RED),)),
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


def test_placeholders_count_the_media_of_the_whole_value() -> None:
    parts = to_parts(["see", plain_image(), {"then": plain_image()}, plain_image(), {"at last": plain_image()}])
    assert [part.text for part in parts if isinstance(part, Text)] == [
        *("see", '{"then": "[image 2]"}', '{"at last": "[image 4]"}')
    ]
    assert [type(part) for part in parts] == [Text, Image, Text, Image, Image, Text, Image]


def test_a_nested_medium_that_is_refused_is_replaced_by_a_note_and_counted() -> None:
    parts, refused, structured = convert_value(
        {"bad": decode(truncated_png()), "empty": [plain_image(0, 0)], "good": plain_image()}
    )
    assert structured == {
        "bad": "[image left out: not a readable image: image file is truncated]",
        "empty": ["[image left out: not a readable image: its size is 0x0]"],
        "good": "[image 1]",
    }
    assert parts == (Text(json.dumps(structured)), Image(RED)) and refused == 2


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


def test_a_data_uri_becomes_an_image() -> None:
    assert to_parts(URI) == (Image(RED),)
    assert to_parts(["see", URI]) == (Text("see"), Image(RED))
    assert to_parts("data:image/jpeg," + quote(RED)) == (Image(RED),)


@pytest.mark.parametrize(
    "text",
    [
        "data:image/png;base64,iVBOR... is what it said",
        "data:image/png;base64,aGVsbG8=",
        to_data_uri(Image(SVG, "image/svg+xml")),
        to_data_uri(Audio(b"RIFF\0\0\0\0WAVE")),
        f"see {URI}",
    ],
)
def test_other_texts_stay_text(text: str) -> None:
    assert to_parts(text) == (Text(text),)
    assert to_parts([text, 1]) == (Text(json.dumps([text, 1])),)


def test_a_file_in_memory_is_read() -> None:
    assert to_parts(io.BytesIO(RED)) == (Image(RED),)
    assert to_parts(["see", io.BytesIO(RED)]) == (Text("see"), Image(RED))


def test_only_values_that_must_be_encoded_are_heavy() -> None:
    for heavy in (
        plain_image(),
        [["a", plain_image()]],
        {"a": {"b": np.zeros((3, 2), np.uint8)}},
        Chart("a", plain_image()),
    ):
        assert is_heavy(heavy)
    for light in (
        1,
        "a",
        None,
        RED,
        Image(RED),
        animation(),
        {"a": [np.float64(1), RED, "b"]},
        np.zeros(3),
        Chart("a", 1),
    ):
        assert not is_heavy(light)
