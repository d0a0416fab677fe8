"""A line is on the tape whole or not at all, and a tape that could not take one takes no more."""

from __future__ import annotations

import json
import logging
import secrets
from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import version
from io import FileIO
from pathlib import Path

from anyio import to_thread

from gateway.errors import ConfigError, GatewayError
from gateway.tape.lines import FORMAT, Answer, Line, answer_line, specs_line
from gateway.types import Text, ToolSpec

log = logging.getLogger(__name__)


class Writer:
    """The tape while it is recorded. Blobs are written before the line that needs them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.failure: str | None = None
        self._file = _new(path)
        self._whole = 0
        """Bytes of the file that are whole lines."""
        self._blobs: set[str] = set()
        self._listings: list[list[ToolSpec]] = []
        self._sessions = 0

    def header(self, specs: Sequence[ToolSpec]) -> None:
        self._listings.append(list(specs))
        self.write({"kind": "tape", "format": FORMAT, "mtrl": version("mtrl"), "specs": specs_line(specs)})

    def listing(self, specs: Sequence[ToolSpec]) -> int:
        """The number under which the tape knows a list of tools; most sessions share one."""
        mine = list(specs)
        for number, known in enumerate(self._listings):
            if known == mine:
                return number
        self.write({"kind": "specs", "specs": specs_line(mine)})
        self._listings.append(mine)
        return len(self._listings) - 1

    def session(self) -> int:
        """A session's number; its id would let whoever reads the tape into the session."""
        self._sessions += 1
        return self._sessions

    async def kept(self, answer: Answer) -> Line:
        """The answer as a line has it; its media are on the disk by then."""
        if all(isinstance(part, Text) for part in answer.parts):
            return answer_line(answer, {})
        return await to_thread.run_sync(self._keep, answer)

    def write(self, *lines: Line) -> None:
        """Not in a thread: handing some bytes to the system is quicker than the way to a thread and back."""
        if self.failure is not None:
            raise GatewayError(self.failure)
        rest = b"".join(json.dumps(line, separators=(",", ":")).encode() + b"\n" for line in lines)
        size = len(rest)
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            with suppress(OSError):
                self._file.truncate(self._whole)
            raise self._failed(error) from error
        self._whole += size

    def note(self, *lines: Line) -> None:
        """Writes where nobody could be told of a failure; the next question, or the end of the recording, tells it."""
        try:
            self.write(*lines)
        except GatewayError as error:
            log.error("%s", error)

    def close(self) -> None:
        self._file.close()

    def _keep(self, answer: Answer) -> Line:
        blobs: dict[str, bytes] = {}
        line = answer_line(answer, blobs)
        for digest, data in blobs.items():
            if digest not in self._blobs:
                self._put(digest, data)
                self._blobs.add(digest)
        return line

    def _put(self, digest: str, data: bytes) -> None:
        """Under its name only when whole: two sessions may bring the same picture at once."""
        part = self.path / "blobs" / f"{digest}.{secrets.token_hex(4)}.part"
        try:
            part.write_bytes(data)
            part.replace(self.path / "blobs" / digest)
        except OSError as error:
            with suppress(OSError):
                part.unlink()
            raise self._failed(error) from error

    def _failed(self, error: OSError) -> GatewayError:
        problem = f"recording to {self.path} has stopped: {error.strerror}"
        self.failure = f"{problem}. What it holds can be replayed; mend the disk and record to another path"
        return GatewayError(self.failure)


def _new(path: Path) -> FileIO:
    remedy = "record to a path that does not exist yet"
    try:
        (path / "blobs").mkdir(parents=True)
        return FileIO(path / "tape.jsonl", "x")
    except FileExistsError as error:
        raise ConfigError("there is a recording already", file=path, remedy=remedy) from error
    except OSError as error:
        raise ConfigError(f"cannot record here: {error.strerror}", file=path, remedy=remedy) from error
