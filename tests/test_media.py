"""Media arrive from anywhere, and nothing large is decoded to find out that it is too large."""

from __future__ import annotations

import base64
import io
import re
import struct
import zlib
from pathlib import Path
from typing import Any

import pytest
from PIL import Image as Pictures

from gateway.media import MediaError, admitted, data_uri, of_bytes, size, sniff, to_medium, to_parts
from gateway.types import Audio, Image, Resource, Text, Video


def png(width: int = 2, height: int = 3) -> bytes:
    out = io.BytesIO()
    Pictures.new("RGB", (width, height), "red").save(out, format="PNG")
    return out.getvalue()


def bomb(width: int, height: int) -> bytes:
    """A PNG that says how large it is, and has nothing in it."""
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = [(b"IHDR", head), (b"IDAT", b"")]
    framed = [
        struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body)) for kind, body in chunks
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(framed)


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
        assert isinstance(medium, Image) and size(medium) == (2, 3)


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


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (bomb(9000, 9000), "9000x9000 pixels, more than"),
        (bomb(60_000, 60_000), "not a readable picture|pixels, more than"),
        (b"\x89PNG\r\n\x1a\nnothing", "not a readable picture"),
        (png() + bytes(33 * 1024 * 1024), "bytes, more than"),
    ],
)
def test_a_medium_that_may_not_pass_leaves_a_note_in_its_place(data: bytes, words: str) -> None:
    parts, refused = admitted([Text("a"), Image(data), Text("b")])
    assert refused == 1 and [type(part) for part in parts] == [Text, Text, Text]
    assert re.search(words, parts[1].text) and parts[1].text.startswith("[image left out:")  # type: ignore[union-attr]


def test_a_picture_in_a_resource_is_measured_as_any_other() -> None:
    document = Resource("file:///a.pdf", "application/pdf", data=b"%PDF")
    parts, refused = admitted([Resource("file:///a.png", "image/png", data=bomb(9000, 9000)), document])
    assert refused == 1 and parts[1] is document
    assert isinstance(parts[0], Text) and parts[0].text.startswith("[resource left out: 9000x9000 pixels")


def test_equal_content_has_one_digest_wherever_it_came_from() -> None:
    assert Image(png()).digest == to_medium(data_uri(Image(png()))).digest


def test_what_json_has_no_word_for_becomes_its_text() -> None:
    value: Any = {"a": {1}, "b": Path("x"), 3: None}
    assert to_parts(value) == (Text('{"a": [1], "b": "x", "3": null}'),)
