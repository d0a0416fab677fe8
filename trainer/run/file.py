"""A run is a folder that only grows: rollouts are added at the end, and what is there is read one by one.

    runs/NAME/rollouts.jsonl           a rollout a line, as `line.py` describes
    runs/NAME/credits.jsonl            what steps made of their tokens, as `credits.py` describes
    runs/NAME/blobs/SHA256             pictures, sounds, films and documents, each once
    runs/NAME/rollouts.jsonl.offsets   where each line begins, for quick reading; see `offsets.py`

One process adds at a time, and any number read meanwhile. A line that ends in mid-word, because the writer was killed,
is no rollout: readers pass over it, and the next writer cuts it off, as it does in the credits.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from threading import Lock
from types import TracebackType
from typing import Self, overload

from trainer.run import credits
from trainer.run.blobs import Folder
from trainer.run.line import dump, load
from trainer.run.offsets import offsets
from trainer.run.rollout import Rollout

NAME = "rollouts.jsonl"


class RunError(Exception):
    """A run's files are not what they should be. Its text is complete: what, where, and how to mend it."""


class Writer:
    """Adds rollouts to a run, from any thread; each is in the file, whole, when `add` returns."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._blobs = Folder(folder / "blobs")
        self._file = (folder / NAME).open("ab", buffering=0)
        self._credits = folder / credits.NAME
        self._lock = Lock()
        self._file.truncate(offsets(folder / NAME)[-1])
        credits.cut(self._credits)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def add(self, rollout: Rollout) -> None:
        with _told(self._file.name):
            self._add(dump(rollout, self._blobs))

    def credit(self, step: int, rows: Iterable[credits.Weighed]) -> None:
        """What a step that was learned from made of its rollouts."""
        with _told(self._credits), self._credits.open("ab", buffering=0) as opened:
            _append(opened, credits.dump(step, rows))

    def _add(self, line: bytes) -> None:
        with self._lock:
            _append(self._file, line)


def _append(file: FileIO, line: bytes) -> None:
    start = file.seek(0, 2)
    rest = memoryview(line)
    try:
        while rest:
            rest = rest[file.write(rest) :]
    except BaseException:  # Half a line on a full disk would spoil the next one.
        file.truncate(start)
        raise


@contextmanager
def _told(file: str | Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise RunError(
            f"{file}: cannot be written ({error.strerror})\n"
            "  remedy: make room there, or give another folder; what was over before is saved"
        ) from error


class Rollouts(Sequence[Rollout]):
    """The rollouts of a run as they were when it was opened; each is read when it is asked for."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / NAME
        self._blobs = Folder(folder / "blobs")
        try:
            self._offsets = offsets(self.file)
        except OSError as error:
            raise RunError(
                f"{self.file}: cannot be read ({error.strerror})\n"
                "  remedy: name the folder of a run, which holds this file once its first rollout is over"
            ) from error

    def __len__(self) -> int:
        return len(self._offsets) - 1

    @overload
    def __getitem__(self, index: int) -> Rollout: ...
    @overload
    def __getitem__(self, index: slice) -> list[Rollout]: ...
    def __getitem__(self, index: int | slice) -> Rollout | list[Rollout]:
        places = range(len(self))
        if isinstance(index, slice):
            return list(self._read(places[index]))
        try:
            place = places[index]
        except IndexError:
            raise IndexError(
                f"{self.file} holds {len(self)} rollouts, counted from 0, and no rollout {index}"
            ) from None
        return next(self._read(range(place, place + 1)))

    def __iter__(self) -> Iterator[Rollout]:
        return self._read(range(len(self)))

    def _read(self, places: range) -> Iterator[Rollout]:
        with self.file.open("rb") as opened:
            for place in places:
                start, end = self._offsets[place], self._offsets[place + 1]
                opened.seek(start)
                yield self._rollout(opened.read(end - start), place)

    def _rollout(self, line: bytes, place: int) -> Rollout:
        try:
            return load(line, self._blobs)
        except ValueError as error:
            raise RunError(
                f"{self.file}: line {place + 1}: {error}\n"
                "  remedy: read it with the version of mtrl that wrote it, or take the line out"
            ) from error
