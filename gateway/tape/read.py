"""A tape is believed line by line: what was torn off its end is said aloud, anything else wrong with it is refused."""

from __future__ import annotations

import json
import logging
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any

from gateway.errors import ReplayError, SessionError
from gateway.tape.asked import FINISH, Key, called, task_digest, told
from gateway.tape.lines import FORMAT, Line, digests, specs_of, task_line
from gateway.types import Task, ToolCall, ToolSpec

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Held:
    """Something recorded once, that one replaying session at a time may take."""

    session: int
    uses: int = 0
    holders: int = 0


@dataclass(slots=True)
class Opening(Held):
    task: Line = field(default_factory=dict)
    interaction: str | None = None
    listing: int = 0
    entries: list[Entry] = field(default_factory=list)


@dataclass(slots=True)
class Entry(Held):
    """An answer, by the place of its line: a tape may be larger than the memory."""

    at: int = 0
    size: int = 0


@dataclass(frozen=True, slots=True)
class Summary:
    """A tape in numbers, for people."""

    mtrl: str
    """The version that recorded it."""
    sessions: int
    closed: int
    """Sessions that were recorded to their end."""
    tools: dict[str, int]
    """Calls by tool, the most called first."""
    feedback: int
    blobs: int
    bytes: int
    torn: bool
    """The recording was cut off in the middle of its last line."""

    @property
    def calls(self) -> int:
        return sum(self.tools.values())

    def __str__(self) -> str:
        tools = ", ".join(f"{name} {count}" for name, count in self.tools.items()) or "none"
        ends = f" ({self.sessions - self.closed} cut short)" if self.closed < self.sessions else ""
        return (
            f"{self.sessions} sessions{ends}, {self.calls} calls ({tools}), {self.feedback} feedback turns, "
            f"{self.blobs} media, {self.bytes} bytes, recorded by mtrl {self.mtrl}"
        )


class Tape:
    """Where each answer stands. Made by `load`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.file = path / "tape.jsonl"
        self.mtrl = ""
        self.torn = False
        self.listings: list[tuple[ToolSpec, ...]] = []
        self.openings: dict[str, list[Opening]] = defaultdict(list)
        """By the digest of the task."""
        self.unopened: dict[str, str] = {}
        """The tasks that no session could be opened for, and why."""
        self.answers: dict[str, dict[tuple[str, int], list[Entry]]] = defaultdict(lambda: defaultdict(list))
        """By what was asked before, then by the question."""
        self.tools: Counter[str] = Counter()
        self.feedback = 0
        self.blobs: set[str] = set()
        self.sessions: dict[int, Opening] = {}
        self.closed: set[int] = set()
        self._offered: set[int] = {0}
        self._messages: dict[int, list[Any]] = defaultdict(list)

    @cached_property
    def specs(self) -> tuple[ToolSpec, ...]:
        """Everything that was ever offered while the tape ran; the last word on a tool is the one that counts."""
        return tuple({spec.name: spec for number in sorted(self._offered) for spec in self.listings[number]}.values())

    @cached_property
    def pure(self) -> frozenset[str]:
        return frozenset(spec.name for spec in self.specs if spec.hints.pure)

    @property
    def summary(self) -> Summary:
        return Summary(
            mtrl=self.mtrl,
            sessions=len(self.sessions),
            closed=len(self.closed),
            tools=dict(self.tools.most_common()),
            feedback=self.feedback,
            blobs=len(self.blobs),
            bytes=sum(file.stat().st_size for file in self.path.rglob("*") if file.is_file()),
            torn=self.torn,
        )

    def opened(self, task: Task) -> list[Opening]:
        """The recorded sessions of a task, in the order in which they were opened; raises what was raised then."""
        digest = task_digest(task_line(task))
        if digest in self.unopened and digest not in self.openings:
            raise SessionError(self.unopened[digest])
        return self.openings.get(digest, [])

    def entries(self, key: Key) -> list[Entry]:
        """The answers to one question, in the order of the tape."""
        return self.answers.get(key.after, {}).get((key.question, key.nth), [])

    def line(self, entry: Entry) -> Line:
        with self.file.open("rb") as file:
            file.seek(entry.at)
            line: Line = json.loads(file.read(entry.size))
            return line

    def blob(self, digest: str) -> bytes:
        file = self.path / "blobs" / digest
        try:
            data = file.read_bytes()
        except OSError as error:
            raise ReplayError(f"{file}: cannot be read: {error.strerror}; copy the whole tape again") from error
        if sha256(data).hexdigest() != digest:
            raise ReplayError(f"{file}: this is not what was recorded; copy the whole tape again")
        return data

    def take(self, line: Line, at: int, size: int) -> None:
        """One line after the header."""
        match line["kind"]:
            case "specs":
                self.listings.append(specs_of(line["specs"]))
            case "open":
                self._take_open(line)
            case "unopened":
                self.unopened[task_digest(line["task"])] = line["refused"]
            case "call":
                self.tools[line["name"]] += 1
                call = ToolCall(line["id"], line["name"], line["arguments"])
                self._place(line, called(call, line["audience"]), at, size)
            case "feedback":
                self.feedback += 1
                before = self._messages[line["session"]]
                before[line["same"] :] = line["messages"]
                self._place(line, told(before), at, size)
            case "finish":
                self._place(line, FINISH, at, size)
            case "close":
                self.closed.add(line["session"])
                self._messages.pop(line["session"], None)
            case other:
                raise ValueError(f"a line of kind {other!r}")

    def _take_open(self, line: Line) -> None:
        opening = Opening(line["session"], task=line["task"], interaction=line["interaction"], listing=line["specs"])
        self._offered.add(line["offered"])
        self.sessions[opening.session] = opening
        self.openings[task_digest(line["task"])].append(opening)

    def _place(self, line: Line, question: str, at: int, size: int) -> None:
        entry = Entry(line["session"], at=at, size=size)
        self.answers[line["after"]][question, line.get("nth", 0)].append(entry)
        self.sessions[entry.session].entries.append(entry)
        if "answer" in line:
            self.blobs.update(digests(line["answer"]))


def load(path: str | Path) -> Tape:
    """Reads where everything stands; the answers themselves stay on the disk."""
    tape = Tape(Path(path))
    try:
        for number, (at, raw) in enumerate(_lines(tape.file)):
            _take(tape, number, at, raw)
    except OSError as error:
        problem = f"cannot be read: {error.strerror}"
        raise ReplayError(f"{tape.file}: {problem}; a tape is a folder that `--record` has written") from error
    if not tape.listings:
        raise ReplayError(f"{tape.file}: the tape is empty; its recording ended before it began, so record again")
    _check_blobs(tape)
    return tape


def describe(path: str | Path) -> Summary:
    """What is on a tape; raises `ReplayError` where it could not be replayed."""
    return load(path).summary


def _lines(file: Path) -> Iterator[tuple[int, bytes]]:
    at = 0
    with file.open("rb") as lines:
        for raw in lines:
            yield at, raw
            at += len(raw)


def _take(tape: Tape, number: int, at: int, raw: bytes) -> None:
    try:
        line = json.loads(raw)
        if number == 0:
            _take_header(tape, line)
        else:
            tape.take(line, at, len(raw))
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        if raw.endswith(b"\n"):
            problem = f"line {number + 1} is damaged ({type(error).__name__}: {error})"
            raise ReplayError(f"{tape.file}: {problem}; copy the tape again, or record anew") from error
        tape.torn = True
        log.warning("%s: line %d was cut off by a crash, and is left out", tape.file, number + 1)


def _take_header(tape: Tape, line: Line) -> None:
    if line.get("kind") != "tape":
        raise ReplayError(f"{tape.file}: this is no tape at all; a tape is a folder that `--record` has written")
    if line["format"] != FORMAT:
        remedy = f"replay it with mtrl {line.get('mtrl', 'of its time')}, or record it again"
        raise ReplayError(f"{tape.file}: format {line['format']!r}; this mtrl reads format {FORMAT}; {remedy}")
    tape.mtrl = line["mtrl"]
    tape.listings.append(specs_of(line["specs"]))


def _check_blobs(tape: Tape) -> None:
    """Names are compared, never opened, so that no line can point outside the folder."""
    folder = tape.path / "blobs"
    there = {file.name for file in folder.iterdir()} if folder.is_dir() else set()
    gone = sorted(tape.blobs - there)
    if gone:
        count = f"{len(gone)} of {len(tape.blobs)}"
        raise ReplayError(f"{folder}: {gone[0]!r} is missing ({count} are); a tape is the whole folder, copy it again")
