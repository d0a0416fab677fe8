"""Writes the lines and blobs of a tape."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Sequence
from contextlib import suppress
from io import FileIO
from itertools import chain
from pathlib import Path

from anyio import to_thread

from gateway.disk_errors import require_linked, write_atomically, write_error_remedy
from gateway.errors import ConfigError, GatewayError
from gateway.large_json import write_json
from gateway.tape.line_format import FORMAT, Answer, TapeLine, encode_answer
from gateway.types import ToolSpec, are_text
from gateway.version import installed_version
from gateway.wire import is_large_answer, spec_to_json

log = logging.getLogger(__name__)

_ENCODER = json.JSONEncoder(separators=(",", ":"))


class TapeWriter:
    """Writes a tape. Blobs are written before the line that refers to them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.failure: str | None = None
        self.error: OSError | None = None
        self._file = _create_tape(path)
        self._complete_bytes = 0
        """The size of the file up to the last whole line."""
        self._blobs: set[str] = set()
        self._listings: list[list[ToolSpec]] = []
        self._session_count = 0

    def write_header(self, specs: Sequence[ToolSpec]) -> None:
        """Writes the first line, with the tools offered now."""
        self._listings.append(list(specs))
        listed = [spec_to_json(spec) for spec in specs]
        self.write({"kind": "tape", "format": FORMAT, "mtrl": installed_version(), "specs": listed})

    def get_listing_number(self, specs: Sequence[ToolSpec]) -> int:
        """The number of a list of tools on the tape; a new list is written first."""
        wanted = list(specs)
        for number, listing in enumerate(self._listings):
            if listing == wanted:
                return number
        self.write({"kind": "specs", "specs": [spec_to_json(spec) for spec in wanted]})
        self._listings.append(wanted)
        return len(self._listings) - 1

    def new_session_number(self) -> int:
        """The next session number. Session ids are not recorded, because they give access to the session."""
        self._session_count += 1
        return self._session_count

    async def encode_answered(self, line: TapeLine, answer: Answer) -> bytes:
        """The line of an answered request, its answer's media written to disk; in a thread if that takes long."""
        if are_text(answer.parts) and not is_large_answer(answer):
            return _ENCODER.encode(line | {"answer": encode_answer(answer, {})}).encode()
        return await to_thread.run_sync(self._encode_with_blobs, line, answer)

    def write(self, *lines: TapeLine) -> None:
        """Appends lines. Not in a thread: a small write is faster than a switch to a thread and back."""
        self.write_encoded(_ENCODER.encode(line).encode() for line in lines)

    def write_encoded(self, lines: Iterable[bytes]) -> None:
        """Appends lines that are encoded already."""
        if self.failure is not None:
            raise GatewayError(self.failure)
        size = 0
        try:
            for unwritten in chain.from_iterable((line, b"\n") for line in lines):
                size += len(unwritten)
                while unwritten:
                    unwritten = unwritten[self._file.write(unwritten) :]
            require_linked(self._file.fileno(), self.path / "tape.jsonl")
        except OSError as error:
            with suppress(OSError):
                self._file.truncate(self._complete_bytes)
            raise self._stop(error) from error
        self._complete_bytes += size

    def try_write(self, *lines: TapeLine) -> None:
        """Appends lines; a failure is only logged, and raised at the next request or at the end of the recording."""
        try:
            self.write(*lines)
        except GatewayError as error:
            log.error("%s", error)

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    def _encode_with_blobs(self, line: TapeLine, answer: Answer) -> bytes:
        blobs: dict[str, bytes] = {}
        line = line | {"answer": encode_answer(answer, blobs)}
        for digest, data in blobs.items():
            if digest not in self._blobs:
                self._write_blob(digest, data)
                self._blobs.add(digest)
        return write_json(_ENCODER, line).encode()

    def _write_blob(self, digest: str, data: bytes) -> None:
        """Writes a blob, renamed into place when complete: two sessions may write the same one at once."""
        try:
            write_atomically(self.path / "blobs" / digest, data, sync=False)
        except OSError as error:
            raise self._stop(error) from error

    def _stop(self, error: OSError) -> GatewayError:
        self.error = error
        remedy = write_error_remedy(self.path, error, "and record to another path")
        problem = f"recording to {self.path} has stopped: {error.strerror}"
        self.failure = f"{problem}. What is recorded can be replayed; {remedy}"
        return GatewayError(self.failure)


def _create_tape(path: Path) -> FileIO:
    remedy = "record to a path that does not exist yet"
    try:
        (path / "blobs").mkdir(parents=True)
        return FileIO(path / "tape.jsonl", "x")
    except FileExistsError as error:
        raise ConfigError("there is a recording already", file=path, remedy=remedy) from error
    except OSError as error:
        raise ConfigError(f"cannot record here: {error.strerror}", file=path, remedy=remedy) from error
