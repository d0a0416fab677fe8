"""Rows are read where they lie, each when it is asked for, and each has a place: a file and a line.

Lines of JSON stay in their file, and only where each begins is kept. A parquet file is held as an Arrow table, which
is about as large as its text; a saved data set is mapped from its folder. Rows given as Python values are held.
"""

from __future__ import annotations

import json
import os
import re
import sys
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol

from gateway.errors import ConfigError
from trainer.data.plain import Row, plain

HUB = re.compile(r"(?P<name>[\w-][\w.-]*(/[\w.-]+)?)(:(?P<subset>[\w.-]+))?")
KNOWN = "a .jsonl file, a .parquet file, a folder that `save_to_disk` wrote, or a data set's name as `org/name:subset`"


class Rows(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def folder(self) -> Path:
        """What paths in a row are seen from."""
        ...

    def __len__(self) -> int: ...

    def __getitem__(self, number: int, /) -> Row:
        """Raises ConfigError for what is no row."""
        ...

    def place(self, number: int, /) -> str:
        """File and line, as editors and terminals understand them."""
        ...


class Lines:
    """JSON objects, one a line; empty lines are passed over."""

    def __init__(self, file: Path) -> None:
        self.name, self.folder = str(file), file.parent
        self._file = file
        self._begins, self._numbers = array("Q"), array("Q")
        with file.open("rb") as opened:
            self._stamp = _stamp(opened.fileno())
            begin = 0
            for number, line in enumerate(opened, 1):
                if line.strip():
                    self._begins.append(begin)
                    self._numbers.append(number)
                begin += len(line)

    def __len__(self) -> int:
        return len(self._begins)

    def __getitem__(self, number: int) -> Row:
        with self._file.open("rb") as opened:
            if _stamp(opened.fileno()) != self._stamp:
                raise ConfigError("has changed since its rows were checked", file=self._file, remedy="start anew")
            opened.seek(self._begins[number])
            line = opened.readline()
        try:
            value = json.loads(line.decode("utf-8-sig"))
        except (ValueError, RecursionError) as error:
            problem = f"is no JSON ({error})"
            raise ConfigError(problem, file=self.place(number), remedy="write one JSON object on each line") from None
        return _object(value, self.place(number))

    def place(self, number: int) -> str:
        return f"{self.name}:{self._numbers[number]}"


class Table:
    """An Arrow table. It gives every row the keys of all rows, so that a null there is a key left out."""

    def __init__(self, name: str, folder: Path, count: int, part: Callable[[int], Any]) -> None:
        self.name, self.folder = name, folder
        self._count, self._part = count, part

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, number: int) -> Row:
        row: Row = plain(self._part(number).to_pylist()[0], sparse=True)
        return row

    def place(self, number: int) -> str:
        return f"{self.name}:{number + 1}"


class Held:
    """Rows that somebody made in Python."""

    name, folder = "rows", Path()

    def __init__(self, rows: Iterable[Any]) -> None:
        self._rows = list(rows)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, number: int) -> Row:
        return _object(plain(self._rows[number]), self.place(number))

    def place(self, number: int) -> str:
        return f"{self.name}:{number + 1}"


class Joined:
    """The rows of several places, one after the other; paths in them are seen from the folder that holds them all."""

    def __init__(self, parts: Sequence[Rows]) -> None:
        self.name = ", ".join(part.name for part in parts)
        self.folder = Path(os.path.commonpath([part.folder.absolute() for part in parts]))
        self._parts, self._ends = parts, list(accumulate(map(len, parts)))

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, number: int) -> Row:
        part, within = self._at(number)
        return part[within]

    def place(self, number: int) -> str:
        part, within = self._at(number)
        return part.place(within)

    def _at(self, number: int) -> tuple[Rows, int]:
        place = bisect_right(self._ends, number)
        return self._parts[place], number - (self._ends[place - 1] if place else 0)


def find(source: str | Path | Iterable[Row], split: str) -> Rows:
    """The rows of a file, a folder, a data set or an iterable. Raises ConfigError where there are none to be had.

    Several places are named with commas between them.
    """
    if not isinstance(source, str | Path):
        return _given(source, split)
    if isinstance(source, str) and "," in source and not Path(source).expanduser().exists():
        return Joined([find(one.strip(), split) for one in source.split(",") if one.strip()])
    path = Path(source).expanduser()
    try:
        if path.is_dir():
            return _saved(path, split)
        if path.suffix in READERS:
            return READERS[path.suffix](path)
    except OSError as error:
        raise ConfigError(f"cannot be read ({error.strerror or error})", file=path, remedy=f"name {KNOWN}") from error
    if path.exists():
        raise ConfigError(f"is of no known kind ({path.suffix or 'no suffix'})", file=path, remedy=f"name {KNOWN}")
    return _hub(str(source), split)


def _parquet(file: Path) -> Rows:
    import pyarrow.parquet  # type: ignore[import-untyped]  # slow, and needed for such files alone

    try:
        table = pyarrow.parquet.read_table(file, memory_map=True)
    except pyarrow.ArrowInvalid as error:
        raise ConfigError(f"is no parquet file ({error})", file=file, remedy="write it anew") from error
    return Table(str(file), file.parent, len(table), lambda number: table.slice(number, 1))


READERS: Mapping[str, Callable[[Path], Rows]] = {".jsonl": Lines, ".parquet": _parquet}


def _given(source: Iterable[Row], split: str) -> Rows:
    library = sys.modules.get("datasets")  # Who holds one of its data sets has imported it.
    if library is not None and isinstance(source, library.Dataset | library.DatasetDict):
        return _dataset(source, "rows", Path(), split)
    return Held(source)


def _saved(folder: Path, split: str) -> Rows:
    import datasets  # type: ignore[import-untyped]  # slow, and needed for such folders alone

    try:
        return _dataset(datasets.load_from_disk(str(folder)), str(folder), folder, split)
    except FileNotFoundError as error:
        problem = "is a folder, but `save_to_disk` did not write it"
        raise ConfigError(problem, file=folder, remedy=f"name {KNOWN}") from error


def _hub(source: str, split: str) -> Rows:
    named = HUB.fullmatch(source)
    if named is None:
        raise ConfigError("there is no such file or folder", file=source, remedy=f"name {KNOWN}")
    import datasets  # slow, and needed for such names alone

    try:
        found = datasets.load_dataset(named["name"], named["subset"], split=split)
    except Exception as error:  # boundary: a network, a hub and a library may fail in any way
        problem = f"is no file or folder here, and no data set could be had by this name ({_first_line(error)})"
        raise ConfigError(problem, file=source, remedy=f"name {KNOWN}") from error
    return _dataset(found, source, Path(), split)


def _dataset(found: Any, name: str, folder: Path, split: str) -> Rows:
    if isinstance(found, Mapping):
        if split not in found:
            remedy = f"choose one of {', '.join(map(repr, found))}"
            raise ConfigError(f"has no split {split!r}", file=name, remedy=remedy)
        found = found[split]
    table = found.with_format("arrow")  # Pictures stay the bytes that they are.
    return Table(name, folder, len(found), lambda number: table[number : number + 1])


def _object(value: Any, place: str) -> Row:
    if isinstance(value, dict):
        return value
    kind = {list: "a list", str: "a text", type(None): "nothing"}.get(type(value), f"a {type(value).__name__}")
    raise ConfigError(f"is {kind}, not an object with columns", file=place, remedy='write {"prompt": ...}')


def _stamp(file: int) -> Sequence[int]:
    stat = os.fstat(file)
    return stat.st_size, stat.st_mtime_ns, stat.st_ino


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:300]
