"""What a person reads in a terminal: tools as a table, a result as text with its pictures in files."""

from __future__ import annotations

import json
import mimetypes
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text as Line

from gateway.media.header import size
from gateway.media.kind import MediaError
from gateway.schema import outline
from gateway.types import Audio, Image, Part, Resource, Text, ToolResult, ToolSpec, Video


def out() -> Console:
    return Console(soft_wrap=True, highlight=False)


def err() -> Console:
    return Console(stderr=True, soft_wrap=True, highlight=False)


def tools(specs: Iterable[ToolSpec]) -> None:
    """Every tool in a row."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in ("tool", "for", "arguments", "what it does", "from"):
        table.add_column(column, overflow="fold")
    for spec in specs:
        says = spec.description.strip().splitlines()
        cells = (spec.name, spec.audience, outline(spec.parameters), says[0] if says else "", spec.owner)
        table.add_row(*(Line(cell) for cell in cells))
    out().print(table)


def left_out(reasons: Mapping[str, str]) -> None:
    """What is not in the list, with the reason; beside the list, so that a program reads only that."""
    for name, reason in reasons.items():
        err().print(f"[yellow]left out[/] {escape(name)}: {escape(reason)}")


def result(answer: ToolResult, name: str, folder: Path) -> None:
    """The parts in order; what is no text goes into files of `folder`, and each is named."""
    for part in answer.parts:
        # Bytes of a tool go to the terminal as text only: no markup of ours, no control codes of theirs.
        sys.stdout.write(_printable(_line(part, name, folder)) + "\n")
    notes = [f"{key} {value}" for key, value in answer.metrics.items()]
    if answer.reward is not None:
        notes.insert(0, f"reward {answer.reward:g}")
    if answer.done:
        notes.insert(0, "done")
    if answer.outcome != "ok":
        notes.insert(0, f"{answer.outcome}: {answer.reason or 'the tool says so'}")
    for note in notes:
        err().print(Line(_printable(note), style="yellow"))


def _line(part: Part, name: str, folder: Path) -> str:
    match part:
        case Text(text):
            return text
        case Resource(uri, text=str(text)):
            return f"{uri}\n{text}"
        case Resource(uri, data=None):
            return f"{uri} {part.description or part.name or ''}".rstrip()
        case Resource(uri, mime, data=bytes(data)):
            return f"{uri} saved as {_saved(data, mime, name, folder)}"
        case Image():
            return f"image saved as {_saved(part.data, part.mime, name, folder)} ({_size(part)})"
        case Audio() | Video():
            return f"{type(part).__name__.lower()} saved as {_saved(part.data, part.mime, name, folder)}"
    return ""


def _saved(data: bytes, mime: str | None, name: str, folder: Path) -> Path:
    """A new file each time: nothing that is there is written over."""
    folder.mkdir(parents=True, exist_ok=True)
    suffix = mimetypes.guess_extension(mime or "") or ".bin"
    number = 1
    while (file := folder / f"{name}-{number}{suffix}").exists():
        number += 1
    file.write_bytes(data)
    return file


def _size(image: Image) -> str:
    try:
        width, height = size(image.data)
    except MediaError as error:
        return str(error)
    return f"{width}x{height}, {image.mime}"


def _printable(text: str) -> str:
    """Control codes made visible, so that a tool cannot repaint the terminal."""
    return "".join(char if char.isprintable() or char in "\n\t" else f"\\x{ord(char):02x}" for char in text)


def json_text(value: Any) -> None:
    sys.stdout.write(json.dumps(value, indent=2, ensure_ascii=False) + "\n")
