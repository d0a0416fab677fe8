"""Tests of structured data in tool results: numbers of numpy and torch, and placeholders for nested media."""

from __future__ import annotations

import io
import json
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gateway.media import to_data_uri
from gateway.media.to_parts import convert_value
from gateway.types import Audio, Image, Part, Resource, Text
from tests.sample_images import plain_image, png

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
