"""Structure stays structure: its numbers are numbers, and it says where each of its media stood."""

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

from gateway.media import data_uri, to_parts
from gateway.media.take import is_heavy, take
from gateway.types import Audio, Image, Part, Resource, Text, Video
from tests.drawn import SVG, moving, plain, png, seen, truncated

RED, BLUE = png(), png(color="blue")
URI = data_uri(Image(RED))


@dataclass
class Chart:
    caption: str
    image: Any


@pytest.mark.parametrize(
    ("value", "said"),
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
def test_numbers_stay_numbers_whoever_made_them(value: Any, said: str) -> None:
    assert take(value) == ((Text(said),), 0, None if said == "three" else json.loads(said))


def test_a_plane_of_bytes_or_of_marks_is_a_picture_unasked_and_so_are_channels() -> None:
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
        assert isinstance(part, Image) and seen(part.data).size == (2, 3)
    (film,) = to_parts(np.zeros((5, 3, 2, 3), np.uint8))
    assert isinstance(film, Video)


@pytest.mark.parametrize(
    ("value", "told", "media"),
    [
        (
            {"caption": "bars", "image": plain()},
            {"caption": "bars", "image": "[image 1]"},
            (Image(RED),),
        ),
        ([["a", plain()]], [["a", "[image 1]"]], (Image(RED),)),
        ({"images": [RED, BLUE]}, {"images": ["[image 1]", "[image 2]"]}, (Image(RED), Image(BLUE))),
        (Chart("bars", io.BytesIO(RED)), {"caption": "bars", "image": "[image 1]"}, (Image(RED),)),
        ({"charts": (Chart("a", Image(RED)),)}, {"charts": [{"caption": "a", "image": "[image 1]"}]}, (Image(RED),)),
        ({"type": "image", "shows": plain()}, {"type": "image", "shows": "[image 1]"}, (Image(RED),)),
        ({"at": URI, "was": f"{URI} here"}, {"at": "[image 1]", "was": f"{URI} here"}, (Image(RED),)),
        ({"raw": bytearray(b"hello"), "held": memoryview(b"a")}, {"raw": "b'hello'", "held": "b'a'"}, ()),
        (
            {"sound": Audio(b"a"), "page": Resource("a", data=b"a"), "two": [plain(), plain()]},
            {"sound": "[audio 1]", "page": "[resource 1]", "two": ["[image 1]", "[image 2]"]},
            (Audio(b"a"), Resource("a", data=b"a"), Image(RED), Image(RED)),
        ),
    ],
)
def test_media_at_any_depth_are_named_where_they_stood_and_follow(
    value: Any, told: Any, media: tuple[Part, ...]
) -> None:
    assert take(value) == ((Text(json.dumps(told)), *media), 0, told)


def test_a_name_counts_the_media_of_the_whole_value() -> None:
    parts = to_parts(["see", plain(), {"then": plain()}, plain(), {"at last": plain()}])
    assert [part.text for part in parts if isinstance(part, Text)] == [
        *("see", '{"then": "[image 2]"}', '{"at last": "[image 4]"}')
    ]
    assert [type(part) for part in parts] == [Text, Image, Text, Image, Image, Text, Image]


def test_a_medium_in_structure_that_cannot_be_shown_is_a_note_in_its_place_and_counted() -> None:
    parts, lost, told = take({"bad": seen(truncated()), "empty": [plain(0, 0)], "good": plain()})
    assert told == {
        "bad": "[image left out: not a readable picture: image file is truncated]",
        "empty": ["[image left out: not a readable picture: it is 0x0]"],
        "good": "[image 1]",
    }
    assert parts == (Text(json.dumps(told)), Image(RED)) and lost == 2


SAID = st.recursive(
    st.sampled_from([1, "a", None, plain(), RED, URI, np.float64(0.5), np.zeros((3, 2), np.uint8), Image(RED)]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
)


@given(value=SAID)
def test_no_text_depends_on_where_a_medium_lay_in_memory(value: Any) -> None:
    parts, lost, _ = take({"all": value})
    said = " ".join(part.text for part in parts if isinstance(part, Text))
    assert lost == 0 and "0x" not in said and "base64" not in said and "PIL" not in said
    assert said.count("[image ") == sum(isinstance(part, Image) for part in parts)


def test_a_data_uri_is_the_picture_that_it_holds() -> None:
    assert to_parts(URI) == (Image(RED),)
    assert to_parts(["see", URI]) == (Text("see"), Image(RED))
    assert to_parts("data:image/jpeg," + quote(RED)) == (Image(RED),)


@pytest.mark.parametrize(
    "text",
    [
        "data:image/png;base64,iVBOR... is what it said",
        "data:image/png;base64,aGVsbG8=",
        data_uri(Image(SVG, "image/svg+xml")),
        data_uri(Audio(b"RIFF\0\0\0\0WAVE")),
        f"see {URI}",
    ],
)
def test_all_other_text_is_text(text: str) -> None:
    assert to_parts(text) == (Text(text),)
    assert to_parts([text, 1]) == (Text(json.dumps([text, 1])),)


def test_a_file_in_memory_is_its_bytes() -> None:
    assert to_parts(io.BytesIO(RED)) == (Image(RED),)
    assert to_parts(["see", io.BytesIO(RED)]) == (Text("see"), Image(RED))


def test_only_what_takes_work_is_work_for_a_thread() -> None:
    for heavy in (plain(), [["a", plain()]], {"a": {"b": np.zeros((3, 2), np.uint8)}}, Chart("a", plain())):
        assert is_heavy(heavy)
    for light in (
        1,
        "a",
        None,
        RED,
        Image(RED),
        moving(),
        {"a": [np.float64(1), RED, "b"]},
        np.zeros(3),
        Chart("a", 1),
    ):
        assert not is_heavy(light)
