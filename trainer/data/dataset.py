"""Opens data sets: JSONL, parquet, saved data sets, the Hugging Face hub, or Python values, as rows with a location.

Rows are read when they are needed. Of a JSONL file only the offsets of its lines are in memory; a parquet file is an
Arrow table of about its own size; a saved data set is memory-mapped.
"""

from __future__ import annotations

import os
import re
import sys
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol

from gateway.bounded_json import JsonDepthError
from gateway.errors import ConfigError
from gateway.line_file import iterate_lines, parse_json_line
from trainer.data.row_media import Row, to_plain

HUB_NAME = re.compile(r"(?P<name>[\w-][\w.-]*(/[\w.-]+)?)(@(?P<revision>[\w./-]+))?(:(?P<subset>[\w.-]+))?")
MAX_ROW_BYTES = 64 << 20
"""The longest line of a JSONL file, unless the settings name another."""
SUPPORTED_SOURCES = (
    "a .jsonl file, a .parquet file, a folder that `save_to_disk` wrote, or a data set's name as "
    "`org/name@revision:subset`"
)


class RowSource(Protocol):
    """Rows by number, each with a location for error messages."""

    @property
    def name(self) -> str: ...

    @property
    def folder(self) -> Path:
        """What paths in a row are relative to."""
        ...

    def __len__(self) -> int: ...

    def __getitem__(self, number: int, /) -> Row:
        """Raises ConfigError if it is not a row."""
        ...

    def location(self, number: int, /) -> str:
        """File and line, in the form that editors and terminals link."""
        ...


ARRAY_TO_LINES = "jq -c '.[]' FILE > FILE.jsonl"


class JsonLines:
    """A file with a JSON object on each line; empty lines are skipped, and too long ones refused."""

    def __init__(self, file: Path, max_row_bytes: int = MAX_ROW_BYTES) -> None:
        self.name, self.folder = str(file), file.parent
        self._file, self._max_row_bytes = file, max_row_bytes
        self._offsets, self._line_numbers = array("Q"), array("Q")
        with file.open("rb") as stream:
            self._stamp = _file_stamp(stream.fileno())
            for line in iterate_lines(stream, max_bytes=max_row_bytes):
                if line.is_too_long:
                    problem = f"is a row of {line.end - line.start} bytes, more than {max_row_bytes}"
                    remedy = "name large media by their path, or split the row"
                    raise ConfigError(problem, file=f"{file}:{line.number}", remedy=remedy)
                if line.data.strip():
                    if not self._offsets and line.data.lstrip(b"\xef\xbb\xbf \t").startswith(b"["):
                        problem = "is a JSON array, not a JSON object on each line"
                        raise ConfigError(problem, file=file, remedy=f"write its rows as lines: `{ARRAY_TO_LINES}`")
                    self._offsets.append(line.start)
                    self._line_numbers.append(line.number)

    def __len__(self) -> int:
        return len(self._offsets)

    def __getitem__(self, number: int) -> Row:
        with self._file.open("rb") as stream:
            if _file_stamp(stream.fileno()) != self._stamp:
                raise ConfigError("has changed since its rows were checked", file=self._file, remedy="start again")
            stream.seek(self._offsets[number])
            line = stream.readline(self._max_row_bytes)
        try:
            value = parse_json_line(line.decode("utf-8-sig"))
        except JsonDepthError as error:
            problem, remedy = f"is a row that is {error}", "put what is deeper into a text, as JSON"
            raise ConfigError(problem, file=self.location(number), remedy=remedy) from None
        except ValueError as error:
            problem, remedy = f"is not JSON ({error})", "write one JSON object on each line"
            raise ConfigError(problem, file=self.location(number), remedy=remedy) from None
        return _check_object(value, self.location(number))

    def location(self, number: int) -> str:
        return f"{self.name}:{self._line_numbers[number]}"


class CountedRows:
    """Rows that a function reads by their number."""

    def __init__(self, name: str, folder: Path, count: int, read_row: Callable[[int], Row]) -> None:
        self.name, self.folder = name, folder
        self._count, self._read_row = count, read_row

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, number: int) -> Row:
        return self._read_row(number)

    def location(self, number: int) -> str:
        return f"{self.name}:{number + 1}"


class JoinedRows:
    """The rows of several sources, one after the other; paths in them are relative to their common folder."""

    def __init__(self, sources: Sequence[RowSource]) -> None:
        self.name = ", ".join(source.name for source in sources)
        self.folder = Path(os.path.commonpath([source.folder.absolute() for source in sources]))
        self._sources, self._ends = sources, list(accumulate(map(len, sources)))

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, number: int) -> Row:
        source, number_in_source = self._find(number)
        return source[number_in_source]

    def location(self, number: int) -> str:
        source, number_in_source = self._find(number)
        return source.location(number_in_source)

    def _find(self, number: int) -> tuple[RowSource, int]:
        index = bisect_right(self._ends, number)
        return self._sources[index], number - (self._ends[index - 1] if index else 0)


def open_rows(source: str | Path | Iterable[Row], split: str) -> RowSource:
    """Opens a file, a folder, a data set or an iterable. Raises ConfigError if there are no rows to read.

    Several sources may be named, separated by commas.
    """
    if not isinstance(source, str | Path):
        return _open_iterable(source, split)
    if isinstance(source, str) and "," in source and not Path(source).expanduser().exists():
        names = [name.strip() for name in source.split(",") if name.strip()]
        return JoinedRows([open_rows(name, split) for name in names])
    path, remedy = Path(source).expanduser(), f"name {SUPPORTED_SOURCES}"
    try:
        if path.is_dir():
            return _open_saved_dataset(path, split)
        if path.suffix == ".jsonl":
            return JsonLines(path)
        if path.suffix == ".parquet":
            return _open_parquet(path)
    except OSError as error:
        raise ConfigError(f"cannot be read ({error.strerror or error})", file=path, remedy=remedy) from error
    if path.exists():
        raise ConfigError(f"has an unknown format ({path.suffix or 'no suffix'})", file=path, remedy=remedy)
    return _open_hub_dataset(str(source), split)


def _open_parquet(file: Path) -> RowSource:
    import pyarrow.parquet  # type: ignore[import-untyped]  # slow to import, and needed only here

    try:
        table = pyarrow.parquet.read_table(file, memory_map=True)
    except pyarrow.ArrowInvalid as error:
        raise ConfigError(f"is not a parquet file ({error})", file=file, remedy="write the file again") from error
    return _arrow_rows(str(file), file.parent, len(table), lambda number: table.slice(number, 1))


def _arrow_rows(name: str, folder: Path, count: int, take: Callable[[int], Any]) -> RowSource:
    """Rows of an Arrow table. It has the keys of all rows in every row, so a null counts as a missing key."""
    return CountedRows(name, folder, count, lambda number: to_plain(take(number).to_pylist()[0], sparse=True))


def _open_iterable(source: Iterable[Row], split: str) -> RowSource:
    library = sys.modules.get("datasets")  # If the source is one of its data sets, it is imported already.
    if library is not None and isinstance(source, library.Dataset | library.DatasetDict):
        return _open_split(source, "rows", Path(), split)
    name, rows = "rows", list(source)
    return CountedRows(
        name, Path(), len(rows), lambda number: _check_object(to_plain(rows[number]), f"{name}:{number + 1}")
    )


def _open_saved_dataset(folder: Path, split: str) -> RowSource:
    import datasets  # type: ignore[import-untyped]  # slow to import, and needed only here

    try:
        return _open_split(datasets.load_from_disk(str(folder)), str(folder), folder, split)
    except FileNotFoundError as error:
        problem = "is a folder, but `save_to_disk` did not write it"
        raise ConfigError(problem, file=folder, remedy=f"name {SUPPORTED_SOURCES}") from error


def _open_hub_dataset(source: str, split: str) -> RowSource:
    match = HUB_NAME.fullmatch(source)
    if match is None:
        raise ConfigError("there is no such file or folder", file=source, remedy=f"name {SUPPORTED_SOURCES}")
    import datasets  # slow to import, and needed only here
    from huggingface_hub import constants as hub

    from trainer.hub import announce

    try:
        announce(f"data set {source}: from {hub.ENDPOINT}, unless it was fetched before")
        dataset = datasets.load_dataset(match["name"], match["subset"], split=split, revision=match["revision"])
    except Exception as error:  # boundary: the network, the hub and the library may fail in any way
        cause = "HF_HUB_OFFLINE is set" if hub.HF_HUB_OFFLINE else _first_line(error)
        problem = f"is not a file or folder here, and no data set of this name can be loaded ({cause})"
        raise ConfigError(problem, file=source, remedy=f"name {SUPPORTED_SOURCES}") from error
    return _open_split(dataset, source, Path(), split)


OTHER_NAMES = {"test": ("test", "validation")}
"""What a split may be called, in the order of preference."""


def _open_split(dataset: Any, name: str, folder: Path, split: str) -> RowSource:
    if isinstance(dataset, Mapping):
        split = next((name for name in OTHER_NAMES.get(split, ()) if name in dataset), split)
        if split not in dataset:
            remedy = f"choose one of {', '.join(map(repr, dataset))}"
            raise ConfigError(f"has no split {split!r}", file=name, remedy=remedy)
        dataset = dataset[split]
    table = dataset.with_format("arrow")  # Keeps images as bytes.
    return _arrow_rows(name, folder, len(dataset), lambda number: table[number : number + 1])


def _check_object(value: Any, location: str) -> Row:
    if isinstance(value, dict):
        return value
    kind = {list: "a list", str: "a text", type(None): "nothing"}.get(type(value), f"a {type(value).__name__}")
    raise ConfigError(f"is {kind}, not an object with columns", file=location, remedy='write {"prompt": ...}')


def _file_stamp(file: int) -> Sequence[int]:
    stat = os.fstat(file)
    return stat.st_size, stat.st_mtime_ns, stat.st_ino


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:300]
