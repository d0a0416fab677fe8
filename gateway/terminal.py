"""Prints tools and results to the terminal; media of results are saved as files."""

from __future__ import annotations

import json
import mimetypes
import os
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text as Line

from gateway.media.sniff import MediaError, read_image_size
from gateway.schema import summarize_parameters
from gateway.server_start import ServerStart
from gateway.types import Audio, Image, Part, Resource, Text, ToolResult, ToolSpec, Video

START_LINE_S = 3.0
"""Interval of lines about servers that are starting, where there is no terminal."""


def stdout_console() -> Console:
    """A console for standard output that does not wrap lines."""
    return Console(soft_wrap=True, highlight=False)


def stderr_console() -> Console:
    """A console for standard error that does not wrap lines."""
    return Console(stderr=True, soft_wrap=True, highlight=False)


def print_tools(specs: Iterable[ToolSpec]) -> None:
    """Prints a table of tools."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in ("tool", "for", "arguments", "what it does", "from"):
        table.add_column(column, overflow="fold")
    for spec in specs:
        table.add_row(*(Line(cell) for cell in _tool_cells(spec)))
    stdout_console().print(table)


def print_plain_tools(specs: Iterable[ToolSpec]) -> None:
    """Prints one tool a line, with tabs between its fields, for other programs."""
    try:
        for spec in specs:
            sys.stdout.write("\t".join(_tool_cells(spec)) + "\n")
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader has enough, such as `head`. What is left in the buffer would fail again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _tool_cells(spec: ToolSpec) -> list[str]:
    """Name, audience, arguments, first line of the description and owner, each without tabs and line breaks."""
    lines = spec.description.strip().splitlines()
    cells = (spec.name, spec.audience, summarize_parameters(spec.parameters), lines[0] if lines else "", spec.owner)
    return [escape_control_codes(" ".join(cell.split())) for cell in cells]


def print_omitted(reasons: Mapping[str, str]) -> None:
    """Prints what the list leaves out to standard error, so that programs read only the list."""
    for name, reason in reasons.items():
        stderr_console().print(f"[yellow]left out[/] {escape(name)}: {escape(reason)}")


def print_result(result: ToolResult, name: str, folder: Path) -> None:
    """Prints a result's parts in order; those that are not text are saved in `folder` and printed as file names."""
    for part in result.parts:
        # Bytes of a tool go to the terminal as text only: no markup of ours, no control codes of theirs.
        sys.stdout.write(escape_control_codes(_format_part(part, name, folder)) + "\n")
    notes = [f"{key} {value}" for key, value in result.metrics.items()]
    if result.reward is not None:
        notes.insert(0, f"reward {result.reward:g}")
    if result.done:
        notes.insert(0, "done")
    if result.outcome != "ok":
        notes.insert(0, f"{result.outcome}: {result.reason or 'reported by the tool'}")
    for note in notes:
        stderr_console().print(Line(escape_control_codes(note), style="yellow"))


def _format_part(part: Part, name: str, folder: Path) -> str:
    match part:
        case Text(text):
            return text
        case Resource(uri, text=str(text)):
            return f"{uri}\n{text}"
        case Resource(uri, data=None):
            return f"{uri} {part.description or part.name or ''}".rstrip()
        case Resource(uri, mime, data=bytes(data)):
            return f"{uri} saved as {_save_media(data, mime, name, folder)}"
        case Image():
            return f"image saved as {_save_media(part.data, part.mime, name, folder)} ({_format_size(part)})"
        case Audio() | Video():
            return f"{type(part).__name__.lower()} saved as {_save_media(part.data, part.mime, name, folder)}"
    return ""


def _save_media(data: bytes, mime: str | None, name: str, folder: Path) -> Path:
    """Saves to a new file; existing files are never overwritten."""
    folder.mkdir(parents=True, exist_ok=True)
    suffix = mimetypes.guess_extension(mime or "") or ".bin"
    number = 1
    while (file := folder / f"{name}-{number}{suffix}").exists():
        number += 1
    file.write_bytes(data)
    return file


def _format_size(image: Image) -> str:
    try:
        width, height = read_image_size(image.data)
    except MediaError as error:
        return str(error)
    return f"{width}x{height}, {image.mime}"


def escape_control_codes(text: str) -> str:
    """Makes control codes visible, so that a tool's output cannot manipulate the terminal."""
    return "".join(char if char.isprintable() or char in "\n\t" else f"\\x{ord(char):02x}" for char in text)


def print_json(value: Any) -> None:
    """Prints a value as indented JSON."""
    sys.stdout.write(json.dumps(value, indent=2, ensure_ascii=False) + "\n")


class StartProgress:
    """A bar for servers that are starting, which names those that are late; where there is no terminal, a line."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress: Progress | None = None
        self._began_at = self._printed_at = time.monotonic()

    def __call__(self, total: int, late: Sequence[str]) -> None:
        now = time.monotonic()
        if not late:
            self._stop()
        elif self._console.is_terminal:
            self._draw(total, late)
        elif now - self._printed_at >= START_LINE_S:
            self._printed_at = now
            self._console.print(Line(f"waiting for servers to start: {', '.join(late)} ({now - self._began_at:.0f} s)"))

    def _draw(self, total: int, late: Sequence[str]) -> None:
        if self._progress is None:
            columns = (TextColumn("{task.description}"), BarColumn(20), TimeElapsedColumn())
            self._progress = Progress(*columns, console=self._console, transient=True)
            self._progress.add_task("", total=total)
            self._progress.start()
        text = escape(f"{total - len(late)} of {total} servers are up; waiting for {', '.join(late)}")
        self._progress.update(self._progress.task_ids[0], completed=total - len(late), description=text)

    def _stop(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None


def show_start(*, is_reported: bool = False) -> ServerStart:
    """A start that waits for all servers and shows on standard error which are late."""
    return ServerStart(on_wait=StartProgress(stderr_console()), is_reported=is_reported)
