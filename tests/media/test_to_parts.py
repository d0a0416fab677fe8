"""Tests of the conversion of tool results to parts: all forms of media, and notes for those that are refused."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image as Pillow

from gateway.media import MediaError, media_from_bytes, sniff, to_data_uri, to_media, to_parts
from gateway.media.sniff import read_image_size
from gateway.media.to_parts import convert_value
from gateway.native.base import ToolResponse
from gateway.types import Audio, Image, Resource, Text, Video
from tests.sample_images import SVG, animation, decode, encode, plain_image, png, truncated_png


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
        (b"RIFF\x00\x00\x00\x00WEBP", Image, "image/webp"),
        (b"RIFF\x00\x00\x00\x00WAVE", Audio, "audio/wav"),
        (b"\x00\x00\x00\x18ftypisom", Video, "video/mp4"),
    ],
)
def test_the_type_comes_from_the_content_not_from_the_declaration(data: bytes, kind: type, mime: str) -> None:
    medium = media_from_bytes(data, "image/png")
    assert isinstance(medium, kind) and medium.mime == mime == sniff(data)


def test_values_that_are_no_media_are_refused() -> None:
    with pytest.raises(MediaError, match="5 bytes of unknown type"):
        media_from_bytes(b"hello")
    with pytest.raises(MediaError, match="object is not an image"):
        to_media(object())


def test_media_and_text_keep_their_order() -> None:
    parts = to_parts(["before", png(), {"type": "text", "text": "between"}, Pillow.new("L", (1, 1)), "after"])
    assert [type(part) for part in parts] == [Text, Image, Text, Image, Text]


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


def test_a_path_in_a_dict_never_opens_a_file(tmp_path: Path) -> None:
    file = tmp_path / "secret.png"
    file.write_bytes(png())
    (part,) = to_parts({"type": "image", "image": str(file)})
    assert isinstance(part, Text) and str(file) in part.text


def test_a_list_of_frames_becomes_one_video() -> None:
    class Response:
        text = "a video"
        image = None
        video = [[Pillow.new("RGB", (4, 4), color) for color in ("red", "blue")]]

    video, text = to_parts(Response())
    assert isinstance(video, Video) and text == Text("a video")
    with Pillow.open(io.BytesIO(video.data)) as frames:
        assert frames.n_frames == 2  # type: ignore[attr-defined]


def test_equal_content_has_equal_digests() -> None:
    assert Image(png()).digest == to_media(to_data_uri(Image(png()))).digest


def test_values_without_a_json_type_become_text() -> None:
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
        "fractions",
        "fractions-first",
        "float",
        "tensor",
        "tensor-first",
        "tensor-fractions",
    ],
)
def test_arrays_of_all_types_and_channel_orders_become_the_same_image(array: Any) -> None:
    assert np.array_equal(np.asarray(decode(to_media(array).data)), RAMP)


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.full((2, 2), -1), "values from -1 to -1; an image has 0 to 255"),
        (np.full((2, 2), np.nan), "values from nan to nan"),
        (np.zeros((2, 2, 2, 2, 2)), "is not an image: it needs rows and columns"),
        (np.zeros((7, 9, 5)), "is not an image: "),
    ],
)
def test_an_array_that_is_no_image_is_refused(array: Any, message: str) -> None:
    with pytest.raises(MediaError, match=message):
        to_media(array)


def test_grey_arrays_and_masks_become_images() -> None:
    assert np.asarray(decode(to_media(np.eye(3, dtype=bool)).data))[0].tolist() == [255, 0, 0]
    assert decode(to_media(np.zeros((3, 4, 1), np.uint8)).data).size == (4, 3)
    assert decode(to_media(np.full((3, 4), 40_000, np.uint16)).data).getpixel((0, 0)) == 40_000


def test_a_response_keeps_valid_media_and_notes_the_others(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(png())
    (tmp_path / "notes.txt").write_text("not image!")
    result = convert_value(
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
    types = [type(part) for part in result.parts]
    assert types == [Image, Text, Text, Image, Text, Text, Text, Text] and result.refused == 5
    text = "\n".join(part.text for part in result.parts if isinstance(part, Text))
    for message in (
        "there is no file",
        "10 bytes of unknown type",
        "SVG images are not supported",
        "URLs are not downloaded",
        "object is not",
    ):
        assert message in text
    assert result.parts[-1] == Text("four")


def test_refused_images_do_not_affect_the_others() -> None:
    result = convert_value(
        ToolResponse(text="The chart says 42.", image=[plain_image(), decode(truncated_png()), plain_image(0, 0)])
    )
    assert result.parts[0] == Image(png()) and result.parts[3] == Text("The chart says 42.") and result.refused == 2
    assert result.parts[1:3] == (
        Text("[image left out: not a readable image: image file is truncated]"),
        Text("[image left out: not a readable image: its size is 0x0]"),
    )


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


def test_frames_of_all_forms_become_a_video() -> None:
    frames = np.stack([np.full((4, 6, 3), shade, np.uint8) for shade in (0, 100, 200)])
    forms = [
        frames,
        torch.tensor(frames).permute(0, 3, 1, 2),
        list(frames),
        [plain_image(6, 4), png(6, 4, "blue")],
        animation(),
    ]
    response = ToolResponse(video=forms)
    for part, count in zip(to_parts(response), (3, 3, 3, 2, 3), strict=True):
        assert isinstance(part, Video) and decode(part.data).n_frames == count


def test_frames_of_different_sizes_are_refused() -> None:
    (part,) = to_parts(ToolResponse(video=[[plain_image(2, 2), plain_image(3, 3)]]))
    assert isinstance(part, Text) and "frames of different sizes: (2, 2) and (3, 3)" in part.text


def test_images_in_modes_that_png_lacks_become_rgb() -> None:
    for mode in ("CMYK", "YCbCr", "HSV", "F", "I"):
        assert decode(to_media(Pillow.new(mode, (2, 3))).data).mode == "RGB"
    jpeg = encode(Pillow.new("CMYK", (2, 3)), "JPEG")
    assert to_media(jpeg) == Image(jpeg, "image/jpeg")
