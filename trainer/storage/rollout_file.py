"""Writes and reads rollouts.jsonl, the append-only file of a run's rollouts, with random access by line.

    runs/NAME/rollouts.jsonl           one rollout per line, see `rollout_line.py`
    runs/NAME/credits.jsonl            advantages and weights of trained tokens, see `token_credit.py`
    runs/NAME/blobs/SHA256             images, audio, videos and documents, each stored once
    runs/NAME/rollouts.jsonl.offsets   a cache of the offset of each line

One process writes at a time; any number of processes may read meanwhile. If the writer is killed in mid-line, readers
ignore the incomplete last line and the next writer truncates it, in the credits as well.

The cache holds `mtrloff1`, the number of bytes of the file that it covers (64 bits), a sha256, and the offset of each
line (64 bits each), all little-endian. The sha256 is of these offsets and the last covered line, so that a cache never
matches another file. It can be deleted at any time.
"""

from __future__ import annotations

import contextlib
import logging
import os
import struct
import sys
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from hashlib import sha256
from io import FileIO
from pathlib import Path
from threading import Lock
from types import TracebackType
from typing import BinaryIO, Self, TypeVar, overload

from gateway.disk_errors import describe_write_error, require_linked, sync_path, write_atomically
from gateway.line_file import MAX_LINE_BYTES
from trainer.rollout.rollout import Rollout
from trainer.storage import token_credit
from trainer.storage.blobs import BlobFolder
from trainer.storage.rollout_line import dump_rollout, load_rollout
from trainer.storage.rollout_summary import RolloutSummary, load_summary

OFFSETS_HEADER = struct.Struct("<8sQ32s")
OFFSETS_MAGIC = b"mtrloff1"
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
    """The offset of each complete line, followed by the end of the last one."""
    cache = file.with_name(file.name + ".offsets")
    with file.open("rb") as stream:
        offsets = _load_offsets(cache, stream) or array("Q", [0])
        cached = len(offsets)
        offsets.extend(_scan_line_ends(stream, offsets[-1]))
        if len(offsets) > cached:
            with contextlib.suppress(OSError):  # The folder may be read-only.
                write_atomically(cache, _dump_offsets(offsets, stream), sync=False)
    return offsets


def _scan_line_ends(stream: BinaryIO, start: int) -> array[int]:
    """The end of each line from the offset `start` on."""
    ends = array("Q")
    stream.seek(start)
    while chunk := stream.read(CHUNK_BYTES):
        index = -1
        while (index := chunk.find(b"\n", index + 1)) >= 0:
            ends.append(start + index + 1)
        start += len(chunk)
    return ends


def _load_offsets(cache: Path, stream: BinaryIO) -> array[int] | None:
    """The cached offsets, or None if the cache is missing, damaged or of another file."""
    try:
        data = cache.read_bytes()
    except OSError:
        return None
    if len(data) <= OFFSETS_HEADER.size or (len(data) - OFFSETS_HEADER.size) % 8:
        return None
    magic, covered, digest = OFFSETS_HEADER.unpack_from(data)
    encoded = data[OFFSETS_HEADER.size :]
    offsets = _to_little_endian(array("Q", encoded))
    if magic != OFFSETS_MAGIC or digest != _compute_digest(encoded, stream, offsets[-1], covered):
        return None
    offsets.append(covered)
    return offsets


def _dump_offsets(offsets: array[int], stream: BinaryIO) -> bytes:
    encoded = _to_little_endian(offsets[:-1]).tobytes()
    return (
        OFFSETS_HEADER.pack(OFFSETS_MAGIC, offsets[-1], _compute_digest(encoded, stream, offsets[-2], offsets[-1]))
        + encoded
    )


def _compute_digest(encoded: bytes, stream: BinaryIO, start: int, end: int) -> bytes:
    if not start < end <= os.fstat(stream.fileno()).st_size:
        return b""
    stream.seek(start)
    return sha256(encoded + stream.read(end - start)).digest()


def _to_little_endian(values: array[int]) -> array[int]:
    if sys.byteorder == "big":
        values.byteswap()
    return values


ROLLOUTS_FILE = "rollouts.jsonl"


class RunError(Exception):
    """A file of a run is missing, damaged or not writable. The message says which, where, and how to fix it."""


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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def add(self, rollout: Rollout) -> None:
        with self._report_write_errors(Path(self._file.name)):
            self._add(dump_rollout(rollout, self._blobs))

    def add_credits(self, step: int, sequences: Iterable[token_credit.CreditedSequence]) -> None:
        """Appends the advantages and weights that a train step gave to the tokens of its rollouts."""
        with self._report_write_errors(self._credits), self._credits.open("ab", buffering=0) as stream:
            append_line(stream, token_credit.dump_credits(step, sequences))

    def sync(self) -> None:
        """Waits until all rollouts and credits are on the disk."""
        with self._report_write_errors(Path(self._file.name)):
            os.fsync(self._file.fileno())
            if self._credits.exists():
                sync_path(self._credits)

    def _add(self, line: bytes) -> None:
        with self._lock:
            append_line(self._file, line)

    @contextmanager
    def _report_write_errors(self, file: Path) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise RunError(describe_write_error(file, error, self._then)) from error


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
