"""Images and videos in data rows: placeholders, formats, sizes and errors."""

from __future__ import annotations

import base64
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from gateway.errors import ConfigError
from gateway.media.sniff import to_data_uri
from gateway.types import Image
from tests.sample_images import animation, decode, encode, plain_image, png, truncated_png
from tests.trainer.test_data import Form, jsonl, parquet, saved
from trainer.data import load_rows
from trainer.rollout.task import Task

RED, BLUE = png(color="red"), png(color="blue")
JPEG = encode(plain_image(20, 10), "JPEG")


def one(row: dict[str, Any], **options: Any) -> Task:
    return load_rows([row], **options)[0]


def told(row: dict[str, Any], **options: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        load_rows([row], **options)
    return str(caught.value)


def content(task: Task) -> list[Any]:
    """Of the first message, with bytes in place of pictures."""
    return [part["text"] if part["type"] == "text" else part["image"].data for part in task.messages[0]["content"]]


def test_placeholders_are_counted_over_all_messages() -> None:
    chat = [
        {"role": "user", "content": "One: <image>"},
        {"role": "assistant", "content": "Red."},
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "And <image>?"}]},
    ]
    task = one({"messages": chat, "images": [RED, BLUE, JPEG]})
    assert [medium.data for medium in task.media] == [RED, BLUE, JPEG]
    assert [part["type"] for part in task.messages[2]["content"]] == ["image", "text", "image", "text"]
    assert task.messages[1] == chat[1] and task.columns["images"] == [RED, BLUE, JPEG]


@pytest.mark.parametrize(
    "form",
    [
        lambda file: RED,
        lambda file: {"bytes": RED, "path": None},
        lambda file: {"bytes": None, "path": file.name},
        lambda file: file.name,
        lambda file: f"./{file.name}",
        lambda file: str(file),
        lambda file: file.as_uri(),
        lambda file: to_data_uri(Image(RED)),
        lambda file: {"image": file.name},
        lambda file: {"url": file.as_uri()},
        lambda file: {"base64": base64.b64encode(RED).decode()},
        lambda file: {"type": "image_url", "image_url": {"url": to_data_uri(Image(RED))}},
        lambda file: {"type": "image", "image": decode(RED)},
    ],
)
def test_image_can_have_every_supported_form(form: Callable[[Path], Any], tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "a.png"
    file.write_bytes(RED)
    column = one({"prompt": "<image>?", "images": [form(file)]})
    assert [decode(medium.data).getpixel((0, 0)) for medium in column.media] == [(255, 0, 0)]
    held = form(file)
    if isinstance(held, dict):
        part = {"type": "image", **held}
        assert one({"prompt": [{"role": "user", "content": [part]}]}).media == column.media


@pytest.mark.parametrize("form", [jsonl, parquet, saved])
def test_paths_are_relative_to_the_data_file(form: Form, tmp_path: Path) -> None:
    source = form(tmp_path, [{"prompt": "<image>?", "images": ["a.png"]}, {"prompt": "none", "images": []}])
    ((tmp_path / "saved") if form is saved else tmp_path).joinpath("a.png").write_bytes(RED)
    tasks = load_rows(source)
    assert [task.media for task in tasks] == [(Image(RED),), ()]
    assert tasks[1].messages == ({"role": "user", "content": "none"},)


def test_image_tables_of_other_libraries_are_read(tmp_path: Path) -> None:
    """Bytes and a path, of which one is null; and parts of messages with the keys of all parts."""
    chat = [{"role": "user", "content": [{"type": "image", "text": None}, {"type": "text", "text": "?"}]}]
    rows = [{"prompt": chat, "images": [{"bytes": data, "path": None}]} for data in (RED, JPEG)]
    file = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    assert [task.media for task in load_rows(file)] == [(Image(RED),), (Image(JPEG, "image/jpeg"),)]
    known = datasets.Features({"prompt": datasets.Value("string"), "images": [datasets.Image()]})
    library = datasets.Dataset.from_list([{"prompt": "<image>", "images": [{"bytes": RED, "path": None}]}], known)
    assert load_rows(library)[0].media == (Image(RED),)


def test_video_is_shown_as_frames() -> None:
    film = animation("GIF", 12)
    assert len(one({"prompt": "<video>?", "videos": [film]}).media) == 8
    assert len(one({"prompt": "<video>?", "videos": [{"video": film, "nframes": 2}]}).media) == 2
    assert len(one({"prompt": "<video>?", "videos": [{"video": film, "fps": 5}]}).media) == 6
    frames = one({"prompt": "<image>, <video>?", "images": [JPEG], "videos": [{"video": [RED, BLUE]}]})
    assert [medium.data for medium in frames.media] == [JPEG, RED, BLUE]


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"prompt": "<image><image>", "images": [RED]},
         "rows:1: images[1]: is missing, but the prompt has a placeholder"),
        ({"prompt": "<image>", "images": [RED, BLUE]}, "images: has 2, but the prompt has 1 placeholder\n"),
        ({"prompt": "?", "images": ["missing.png"]}, "images[0]: there is no file 'missing.png'"),
        ({"prompt": "?", "images": [RED, truncated_png()]}, "images[1]: an image of image/png that is truncated"),
        ({"prompt": "?", "images": ["https://example.org/a.png"]}, "URLs are not downloaded"),
        ({"prompt": "?", "images": [7]}, "images[0]: int is neither a path nor bytes"),
        ({"prompt": "?", "images": [{"image": RED, "min_pixels": "many"}]}, "images[0]: has an invalid size or number"),
        ({"prompt": "?", "videos": [b"ID3"]}, "videos[0]: 3 bytes that are not a video, but audio/mpeg"),
        ({"prompt": [{"role": "user", "content": [{"type": "image"}]}]}, "images[0]: is missing"),
        ({"prompt": [{"role": "user", "content": [{"type": "image", "image": "missing.png"}]}]},
         "messages[0].image: there is no file"),
    ],
)  # fmt: skip
def test_media_errors_are_reported_with_their_field(row: dict[str, Any], words: str) -> None:
    assert words in told(row)


def test_id_of_a_row_depends_on_its_image_content() -> None:
    row = {"prompt": "?", "images": [decode(RED)]}
    assert one(row).id == one({"prompt": "?", "images": [decode(bytes(bytearray(RED)))]}).id
    assert one(row).id != one({"prompt": "?", "images": [decode(BLUE)]}).id
