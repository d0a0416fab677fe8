"""Reads and indexes a tape. A last line that a crash cut off is skipped with a warning; other damage is an error."""

from __future__ import annotations

import json
import logging
from collections import defaultdict
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any

from gateway.errors import ReplayError, SessionError
from gateway.line_file import MAX_LINE_BYTES, FileLine, iterate_lines
from gateway.tape.line_format import (
    FINISH_DIGEST,
    FORMAT,
    RequestKey,
    TapeLine,
    blob_digests,
    digest_call,
    digest_feedback,
    digest_task,
    encode_task,
)
from gateway.types import Task, ToolCall, ToolSpec
from gateway.wire import spec_from_json

log = logging.getLogger(__name__)


@dataclass(slots=True)
class TapeItem:
    """Something recorded once, which one replayed session at a time may use."""

    session: int
    """The recorded session that it belongs to."""
    uses: int = 0
    """How often it was replayed."""
    holders: int = 0
    """How many open sessions use it now."""


@dataclass(slots=True)
class SessionRecord(TapeItem):
    """A recorded session."""

    task: TapeLine = field(default_factory=dict)
    interaction: str | None = None
    listing: int = 0
    entries: list[AnswerEntry] = field(default_factory=list)


@dataclass(slots=True)
class AnswerEntry(TapeItem):
    """A recorded answer, as the position of its line: a tape may be larger than memory."""

    offset: int = 0
    size: int = 0


class Tape:
    """An index of a tape, built by `load_tape`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.file = path / "tape.jsonl"
        self.is_truncated = False
        self.listings: list[tuple[ToolSpec, ...]] = []
        self.sessions_by_task: dict[str, list[SessionRecord]] = defaultdict(list)
        """By the digest of the task."""
        self.refused_tasks: dict[str, str] = {}
        """By the digest of the task, why no session could be opened for it."""
        self.answers: dict[str, dict[tuple[str, int], list[AnswerEntry]]] = defaultdict(lambda: defaultdict(list))
        """By `after`, then by request and position (see `RequestKey`)."""
        self.blobs: set[str] = set()
        self.sessions: dict[int, SessionRecord] = {}
        self.closed: set[int] = set()
        self._offered: set[int] = {0}
        self._messages: dict[int, list[Any]] = defaultdict(list)

    @cached_property
    def specs(self) -> tuple[ToolSpec, ...]:
        """All tools that were offered during the recording, each as it was offered last."""
        return tuple({spec.name: spec for number in sorted(self._offered) for spec in self.listings[number]}.values())

    @cached_property
    def pure(self) -> frozenset[str]:
        return frozenset(spec.name for spec in self.specs if spec.hints.pure)

    def find_sessions(self, task: Task) -> list[SessionRecord]:
        """The recorded sessions of a task in the order of opening; if opening one failed, raises the same error."""
        digest = digest_task(encode_task(task))
        if digest in self.refused_tasks and digest not in self.sessions_by_task:
            raise SessionError(self.refused_tasks[digest])
        return self.sessions_by_task.get(digest, [])

    def entries(self, key: RequestKey) -> list[AnswerEntry]:
        """The answers to one request, in the order of the tape."""
        return self.answers.get(key.after, {}).get((key.request, key.nth), [])

    def read_line(self, entry: AnswerEntry) -> TapeLine:
        with self.file.open("rb") as file:
            file.seek(entry.offset)
            line: TapeLine = json.loads(file.read(entry.size))
            return line

    def read_blob(self, digest: str) -> bytes:
        file = self.path / "blobs" / digest
        try:
            data = file.read_bytes()
        except OSError as error:
            raise ReplayError(f"{file}: cannot be read: {error.strerror}; copy the whole tape again") from error
        if sha256(data).hexdigest() != digest:
            raise ReplayError(f"{file}: the content is not what was recorded; copy the whole tape again")
        return data

    def add_line(self, line: TapeLine, offset: int, size: int) -> None:
        """Indexes one line after the header."""
        match line["kind"]:
            case "specs":
                self.listings.append(tuple(map(spec_from_json, line["specs"])))
            case "open":
                self._add_session(line)
            case "unopened":
                self.refused_tasks[digest_task(line["task"])] = line["refused"]
            case "call":
                call = ToolCall(line["id"], line["name"], line["arguments"])
                self._add_entry(line, digest_call(call, line["audience"]), offset, size)
            case "feedback":
                messages = self._messages[line["session"]]
                messages[line["same"] :] = line["messages"]
                self._add_entry(line, digest_feedback(messages), offset, size)
            case "finish":
                self._add_entry(line, FINISH_DIGEST, offset, size)
            case "close":
                self.closed.add(line["session"])
                self._messages.pop(line["session"], None)
            case other:
                raise ValueError(f"a line of kind {other!r}")

    def _add_session(self, line: TapeLine) -> None:
        record = SessionRecord(
            line["session"],
            task=line["task"],
            interaction=line["interaction"],
            listing=line["specs"],
        )
        self._offered.add(line["offered"])
        self.sessions[record.session] = record
        self.sessions_by_task[digest_task(line["task"])].append(record)

    def _add_entry(self, line: TapeLine, request: str, offset: int, size: int) -> None:
        entry = AnswerEntry(line["session"], offset=offset, size=size)
        self.answers[line["after"]][request, line.get("nth", 0)].append(entry)
        self.sessions[entry.session].entries.append(entry)
        if "answer" in line:
            self.blobs.update(blob_digests(line["answer"]))


def load_tape(path: str | Path) -> Tape:
    """Reads and checks a tape's index; the answers themselves stay on disk."""
    tape = Tape(Path(path))
    try:
        with tape.file.open("rb") as stream:
            for line in iterate_lines(stream):
                _parse_line(tape, line)
    except OSError as error:
        problem = f"cannot be read: {error.strerror}"
        raise ReplayError(f"{tape.file}: {problem}; a tape is a folder written by `--record`") from error
    if not tape.listings:
        raise ReplayError(f"{tape.file}: the tape is empty, because its recording ended at once; record again")
    _check_blobs(tape)
    return tape


def _parse_line(tape: Tape, line: FileLine) -> None:
    try:
        if line.is_too_long:
            raise ValueError(f"it has more than {MAX_LINE_BYTES} bytes")
        fields = json.loads(line.data)
        if line.number == 1:
            _read_header(tape, fields)
        else:
            tape.add_line(fields, line.start, len(line.data))
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        if line.is_complete or line.is_too_long:
            problem = f"line {line.number} is damaged ({type(error).__name__}: {error})"
            raise ReplayError(f"{tape.file}: {problem}; copy the tape again, or record it again") from error
        tape.is_truncated = True
        log.warning("%s: line %d was cut off by a crash and is skipped", tape.file, line.number)


def _read_header(tape: Tape, line: TapeLine) -> None:
    if line.get("kind") != "tape":
        raise ReplayError(f"{tape.file}: this is not a tape; a tape is a folder written by `--record`")
    if line["format"] != FORMAT:
        remedy = f"replay it with mtrl {line.get('mtrl', 'of its time')}, or record it again"
        raise ReplayError(f"{tape.file}: format {line['format']!r}; this mtrl reads format {FORMAT}; {remedy}")
    tape.listings.append(tuple(map(spec_from_json, line["specs"])))


def _check_blobs(tape: Tape) -> None:
    """Checks that all blobs exist. Names are only compared, so that no line can point outside the folder."""
    folder = tape.path / "blobs"
    present = {file.name for file in folder.iterdir()} if folder.is_dir() else set()
    missing = sorted(tape.blobs - present)
    if missing:
        count = f"{len(missing)} of {len(tape.blobs)}"
        raise ReplayError(
            f"{folder}: {missing[0]!r} is missing ({count} are); a tape is the whole folder, copy it again"
        )
