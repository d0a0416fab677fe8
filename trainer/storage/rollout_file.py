"""Writes and reads rollouts.jsonl, the append-only file of a run's rollouts, with random access by line.

    runs/NAME/rollouts.jsonl    one rollout per line, see `rollout_line.py`
    runs/NAME/credits.jsonl     advantages and weights of trained tokens, see `token_credit.py`
    runs/NAME/blobs/SHA256      images, audio, videos and documents, each stored once

One process writes at a time; any number of processes may read meanwhile. If the writer is killed in mid-line, readers
ignore the incomplete last line and the next writer truncates it, in the credits as well.
"""

from __future__ import annotations

import contextlib
import logging
import os
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from io import FileIO
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, BinaryIO, Self, TypeVar, overload

from gateway.disk_errors import describe_write_error, require_linked, sync_path
from gateway.errors import OperatorError
from gateway.line_file import MAX_LINE_BYTES
from trainer.rollout.rollout import Rollout
from trainer.storage import token_credit
from trainer.storage.rollout_line import BlobFolder, dump_rollout, load_rollout

if TYPE_CHECKING:
    from trainer.algorithms.packing import BatchRow
from trainer.storage.rollout_summary import RolloutSummary, load_summary

CHUNK_BYTES = 1 << 20
RESTART = "then start again with another --out; rollouts that ended before are saved"
"""What to do after a failed write, once the disk is in order, where rollouts are only collected."""

T = TypeVar("T")
log = logging.getLogger(__name__)


def resume_hint(run: Path) -> str:
    """The same for a training, which can be continued."""
    return f"then continue with `mtrl-train --resume --out {run}`"


@cache
def warn_once(text: str) -> None:
    """Warns about a damaged file; the same only once in a process."""
    log.warning("%s", text)


def read_offsets(file: Path) -> array[int]:
    """The offset of each complete line, followed by the end of the last one; takes 0.4 s for a file of 1 GB."""
    offsets, start = array("Q", [0]), 0
    with file.open("rb") as stream:
        while chunk := stream.read(CHUNK_BYTES):
            index = -1
            while (index := chunk.find(b"\n", index + 1)) >= 0:
                offsets.append(start + index + 1)
            start += len(chunk)
    return offsets


ROLLOUTS_FILE = "rollouts.jsonl"


class RunError(OperatorError):
    """A file of a run is missing, damaged or not writable. The message says which, where, and how to fix it."""


@contextmanager
def reporting_write_errors(file: Path, remedy: str) -> Iterator[None]:
    """Raises RunError, with what to do next, for an error of the disk."""
    try:
        yield
    except OSError as error:
        raise RunError(describe_write_error(file, error, remedy)) from error


class RolloutWriter:
    """Appends rollouts to a run, from any thread. Each is in the file when `add` returns."""

    def __init__(self, folder: Path, then: str = RESTART) -> None:
        """`then` says in errors what to do once the disk is in order."""
        self._then = then
        folder.mkdir(parents=True, exist_ok=True)
        self._blobs = BlobFolder(folder / "blobs")
        self._file = (folder / ROLLOUTS_FILE).open("ab", buffering=0)
        self._credits = folder / token_credit.CREDITS_FILE
        self._lock = Lock()
        self._file.truncate(read_offsets(folder / ROLLOUTS_FILE)[-1])
        token_credit.truncate_credits(self._credits)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def add(self, rollout: Rollout) -> None:
        with reporting_write_errors(Path(self._file.name), self._then):
            self._add(dump_rollout(rollout, self._blobs))

    def add_credits(self, step: int, rows: Iterable[BatchRow]) -> None:
        """Appends the advantages and weights that a train step gave to the tokens of its rollouts."""
        with reporting_write_errors(self._credits, self._then), self._credits.open("ab", buffering=0) as stream:
            append_line(stream, token_credit.dump_credits(step, rows))

    def sync(self) -> None:
        """Waits until all rollouts and credits are on the disk."""
        with reporting_write_errors(Path(self._file.name), self._then):
            os.fsync(self._file.fileno())
            if self._credits.exists():
                sync_path(self._credits)

    def _add(self, line: bytes) -> None:
        with self._lock:
            append_line(self._file, line)


def append_line(file: FileIO, line: bytes) -> None:
    """Appends a line to an unbuffered file, completely or not at all."""
    start = file.seek(0, 2)
    rest = memoryview(line)
    try:
        while rest:
            rest = rest[file.write(rest) :]
        require_linked(file.fileno(), Path(file.name))
    except BaseException:  # On a full disk, the next line must not follow half a line.
        with contextlib.suppress(OSError):
            file.truncate(start)
        raise


class Rollouts(Sequence[Rollout]):
    """The rollouts that a run had when this was opened, as a sequence; each is read from disk on access.

    To ask for a damaged one is an error; where all are gone through, it is warned about once and left out.
    """

    def __init__(self, folder: Path) -> None:
        self.file = folder / ROLLOUTS_FILE
        self._blobs = BlobFolder(folder / "blobs")
        try:
            self._offsets = read_offsets(self.file)
        except OSError as error:
            raise RunError(
                f"{self.file}: cannot be read ({error.strerror})\n"
                "  remedy: name the folder of a run; it has this file once the first rollout has ended"
            ) from error

    def __len__(self) -> int:
        return len(self._offsets) - 1

    @overload
    def __getitem__(self, index: int) -> Rollout: ...
    @overload
    def __getitem__(self, index: slice) -> list[Rollout]: ...
    def __getitem__(self, index: int | slice) -> Rollout | list[Rollout]:
        indices = range(len(self))
        if isinstance(index, slice):
            return list(self._read(indices[index]))
        try:
            place = indices[index]
        except IndexError:
            raise IndexError(
                f"{self.file} has {len(self)} rollouts, counted from 0: there is no rollout {index}"
            ) from None
        return next(self._read(range(place, place + 1)))

    def __iter__(self) -> Iterator[Rollout]:
        return (rollout for _, rollout in self.numbered())

    def numbered(self) -> Iterator[tuple[int, Rollout]]:
        """All intact rollouts with their numbers; warns about the others."""
        return self._numbered(lambda line: load_rollout(line, self._blobs))

    def summaries(self) -> Iterator[tuple[int, RolloutSummary]]:
        """The same as summaries, which takes a tenth of the time: tokens and media are not decoded."""
        return self._numbered(load_summary)

    def _numbered(self, parse: Callable[[bytes], T]) -> Iterator[tuple[int, T]]:
        with self.file.open("rb") as stream:
            for index in range(len(self)):
                try:
                    yield index, self._read_one(stream, index, parse)
                except RunError as error:
                    warn_once(f"{str(error).splitlines()[0]}; this rollout is left out, the others are not affected")

    def _read(self, indices: range) -> Iterator[Rollout]:
        with self.file.open("rb") as stream:
            for index in indices:
                yield self._read_one(stream, index, lambda line: load_rollout(line, self._blobs))

    def _read_one(self, stream: BinaryIO, index: int, parse: Callable[[bytes], T]) -> T:
        start, end = self._offsets[index], self._offsets[index + 1]
        if end - start > MAX_LINE_BYTES:
            problem = f"{self.file}: line {index + 1}: the line has {end - start} bytes, which is too long"
            raise RunError(f"{problem}\n  remedy: remove the line")
        stream.seek(start)
        try:
            return parse(stream.read(end - start))
        except ValueError as error:
            raise RunError(
                f"{self.file}: line {index + 1}: {error}\n"
                "  remedy: read it with the version of mtrl that wrote it, or remove the line"
            ) from error
