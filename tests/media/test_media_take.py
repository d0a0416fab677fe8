"""Media arrive from anywhere, in order with text; what cannot be taken in leaves a note in its place."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image as Pictures

from gateway.media import MediaError, data_uri, of_bytes, sniff, to_medium, to_parts
from gateway.media.header import size
from gateway.media.take import take
from gateway.native.base import ToolResponse
from gateway.types import Audio, Image, Resource, Text, Video
from tests.drawn import SVG, moving, plain, png, saved, seen, truncated


class Array:
    """What numpy and torch arrays have in common."""

    def __init__(self) -> None:
        self.data = bytes(2 * 3 * 3)
        self.__array_interface__ = {"shape": (3, 2, 3), "typestr": "|u1", "strides": (6, 3, 1), "version": 3}

    def tobytes(self) -> bytes:
        return self.data


def test_a_picture_may_come_as_bytes_path_uri_array_or_pil(tmp_path: Path) -> None:
    file = tmp_path / "a.png"
    file.write_bytes(png())
    uri = f"data:image/png;base64,{base64.b64encode(png()).decode()}"
    for value in (png(), bytearray(png()), file, str(file), uri, Pictures.new("CMYK", (2, 3)), Array()):
        medium = to_medium(value)
        assert isinstance(medium, Image) and size(medium.data) == (2, 3)


@pytest.mark.parametrize(
    ("data", "kind", "mime"),
    [
        (b"\xff\xd8\xff\xe0", Image, "image/jpeg"),
        (b"RIFF\x00\x00\x00\x00WEBP", Image, "image/webp"),
        (b"RIFF\x00\x00\x00\x00WAVE", Audio, "audio/wav"),
        (b"\x00\x00\x00\x18ftypisom", Video, "video/mp4"),
    ],
)
def test_the_content_tells_the_type_whatever_was_declared(data: bytes, kind: type, mime: str) -> None:
    medium = of_bytes(data, "image/png")
    assert isinstance(medium, kind) and medium.mime == mime == sniff(data)


def test_bytes_that_are_no_medium_are_refused_with_a_reason() -> None:
    with pytest.raises(MediaError, match="5 bytes of unknown type"):
        of_bytes(b"hello")
    with pytest.raises(MediaError, match="object is not a picture"):
        to_medium(object())


def test_parts_keep_their_order_among_text() -> None:
    parts = to_parts(["before", png(), {"type": "text", "text": "between"}, Pictures.new("L", (1, 1)), "after"])
    assert [type(part) for part in parts] == [Text, Image, Text, Image, Text]


def test_chat_parts_are_read_as_chat_messages_write_them() -> None:
    uri = data_uri(Image(png()))
    sound = base64.b64encode(b"RIFF").decode()
    parts = to_parts(
        [
            {"type": "image_url", "image_url": {"url": uri}},
            {"type": "image_url", "image_url": {"url": "https://example.org/a.png"}},
            {"type": "input_audio", "input_audio": {"data": sound, "format": "mp3"}},
        ]
    )
    assert parts == (Image(png()), Resource("https://example.org/a.png", "image/*"), Audio(b"RIFF", "audio/mp3"))


def test_a_name_inside_a_dict_never_opens_a_file(tmp_path: Path) -> None:
    file = tmp_path / "secret.png"
    file.write_bytes(png())
    (part,) = to_parts({"type": "image", "image": str(file)})
    assert isinstance(part, Text) and str(file) in part.text


def test_a_film_of_frames_is_one_video() -> None:
    class Response:
        text = "a film"
        image = None
        video = [[Pictures.new("RGB", (4, 4), color) for color in ("red", "blue")]]

    film, text = to_parts(Response())
    assert isinstance(film, Video) and text == Text("a film")
    with Pictures.open(io.BytesIO(film.data)) as frames:
        assert frames.n_frames == 2  # type: ignore[attr-defined]


def test_equal_content_has_one_digest_wherever_it_came_from() -> None:
    assert Image(png()).digest == to_medium(data_uri(Image(png()))).digest


def test_what_json_has_no_word_for_becomes_its_text() -> None:
    value: Any = {"a": {1}, "b": Path("x"), 3: None}
    assert to_parts(value) == (Text('{"a": [1], "b": "x", "3": null}'),)


RAMP = np.arange(4 * 5 * 3, dtype=np.uint8).reshape(4, 5, 3)
"""Four rows, five columns, three channels."""


@pytest.mark.parametrize(
    "array",
    [
        RAMP,
        RAMP.transpose(2, 0, 1),
        RAMP.astype(np.int64),
        RAMP / 255,
        (RAMP / 255).astype(np.float32).transpose(2, 0, 1),
        RAMP.astype(np.float32),
        torch.tensor(RAMP),
        torch.tensor(RAMP).permute(2, 0, 1).double(),
        torch.tensor(RAMP / 255, requires_grad=True),
    ],
    ids=[
        "uint8",
        "channels-first",
        "int",
        "shares",
        "shares-first",
        "float",
        "tensor",
        "tensor-first",
        "tensor-shares",
    ],
)
def test_an_array_is_the_same_picture_in_whatever_numbers_and_order(array: Any) -> None:
    assert np.array_equal(np.asarray(seen(to_medium(array).data)), RAMP)


@pytest.mark.parametrize(
    ("array", "words"),
    [
        (np.full((2, 2), -1), "values from -1 to -1, where a picture has 0 to 255"),
        (np.full((2, 2), np.nan), "values from nan to nan"),
        (np.zeros((2, 2, 2, 2, 2)), "no picture"),
        (np.zeros((7, 9, 5)), "no picture"),
    ],
)
def test_an_array_that_is_no_picture_says_why(array: Any, words: str) -> None:
    with pytest.raises(MediaError, match=words):
        to_medium(array)


def test_gray_arrays_and_masks_are_pictures() -> None:
    assert np.asarray(seen(to_medium(np.eye(3, dtype=bool)).data))[0].tolist() == [255, 0, 0]
    assert seen(to_medium(np.zeros((3, 4, 1), np.uint8)).data).size == (4, 3)
    assert seen(to_medium(np.full((3, 4), 40_000, np.uint16)).data).getpixel((0, 0)) == 40_000


def test_a_response_keeps_what_is_sound_and_names_what_is_not(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(png())
    (tmp_path / "notes.txt").write_text("no picture")
    taken = take(
        ToolResponse(
            text="four",
            image=[
                tmp_path / "a.png",
                str(tmp_path / "missing.png"),
                tmp_path / "notes.txt",
                (tmp_path / "a.png").as_uri(),
                SVG,
                "https://example.org/a.png",
                object(),
            ],
        )
    )
    kinds = [type(part) for part in taken.parts]
    assert kinds == [Image, Text, Text, Image, Text, Text, Text, Text] and taken.lost == 5
    told = "\n".join(part.text for part in taken.parts if isinstance(part, Text))
    for words in (
        "there is no file",
        "10 bytes of unknown type",
        "SVG is a drawing",
        "is not fetched",
        "object is not",
    ):
        assert words in told
    assert taken.parts[-1] == Text("four")


def test_one_picture_that_cannot_be_written_costs_no_other() -> None:
    taken = take(ToolResponse(text="The chart says 42.", image=[plain(), seen(truncated()), plain(0, 0)]))
    assert taken.parts[0] == Image(png()) and taken.parts[3] == Text("The chart says 42.") and taken.lost == 2
    assert taken.parts[1:3] == (
        Text("[image left out: not a readable picture: image file is truncated]"),
        Text("[image left out: not a readable picture: it is 0x0]"),
    )


def test_a_path_that_never_ends_is_not_read() -> None:
    for path in ("/dev/zero", "/", "x" * 5000, "a\0b"):
        (part,) = take(ToolResponse(image=[path])).parts
        assert isinstance(part, Text) and part.text.startswith("[image left out:")


@pytest.mark.parametrize(
    "written",
    [
        {"type": "image", "image": "/etc/hostname"},
        {"type": "image_url", "image_url": {"url": "file:///etc/hostname"}},
        {"type": "image_url", "image_url": "/etc/hostname"},
        {"type": "video", "video": ["/etc/hostname"]},
        {"type": "video_url", "video_url": {"url": "/etc/hostname"}},
    ],
)
def test_no_form_of_plain_data_opens_a_file(written: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def opened(file: Path) -> bytes:
        raise AssertionError(f"{file} was read")

    monkeypatch.setattr(Path, "read_bytes", opened)
    (part,) = to_parts([written])
    assert isinstance(part, Text | Resource) and "/etc/hostname" in str(part)


def test_frames_are_a_film_however_they_come() -> None:
    frames = np.stack([np.full((4, 6, 3), shade, np.uint8) for shade in (0, 100, 200)])
    forms = [frames, torch.tensor(frames).permute(0, 3, 1, 2), list(frames), [plain(6, 4), png(6, 4, "blue")], moving()]
    response = ToolResponse(video=forms)
    for part, count in zip(to_parts(response), (3, 3, 3, 2, 3), strict=True):
        assert isinstance(part, Video) and seen(part.data).n_frames == count


def test_frames_of_different_sizes_are_no_film() -> None:
    (part,) = to_parts(ToolResponse(video=[[plain(2, 2), plain(3, 3)]]))
    assert isinstance(part, Text) and "frames of (2, 2) and of (3, 3)" in part.text


def test_a_picture_in_colors_that_png_lacks_is_made_red_green_and_blue() -> None:
    for mode in ("CMYK", "YCbCr", "HSV", "F", "I"):
        assert seen(to_medium(Pictures.new(mode, (2, 3))).data).mode == "RGB"
    jpeg = saved(Pictures.new("CMYK", (2, 3)), "JPEG")
    assert to_medium(jpeg) == Image(jpeg, "image/jpeg")
