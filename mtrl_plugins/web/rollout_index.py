"""An SQLite index of a run's rollouts for the table of the web UI, so that long runs open at once.

A row is read from a rollout's line without decoding tokens or media. The index is the file `rollouts.jsonl.index`
beside the rollouts; it is rebuilt if it belongs to other rollouts, and can be deleted at any time. If it cannot be
written, it is kept in memory.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Callable, Iterable, Mapping
from hashlib import sha256
from pathlib import Path
from threading import Lock
from typing import Any, TypeVar

from gateway.line_file import MAX_LINE_BYTES, FileLine, iterate_lines
from mtrl_plugins.web.rollout_row import COLUMNS, Call, Row, read_row
from mtrl_plugins.web.success_criterion import SuccessCriterion

INDEX_FORMAT = "4"
BATCH_ROWS = 64
"""Rollouts indexed at a time, between which requests are answered."""
LOCK_TIMEOUT_S = 5.0
"""The time to wait for another viewer of the same run."""
INTEGER_COLUMNS = frozenset({
    "place", "start", "end", "step", "idx", "success", "turns", "tokens", "written", "asked", "cached", "calls",
    "version",
})  # fmt: skip
REAL_COLUMNS = frozenset({"reward", "seconds"})
COLUMN_DEFINITIONS = ", ".join(
    f'"{name}" {"INTEGER" if name in INTEGER_COLUMNS else "REAL" if name in REAL_COLUMNS else "TEXT"}'
    f"{' PRIMARY KEY' if name == 'place' else ''}"
    for name in COLUMNS
)
INSERT_ROW = f"INSERT OR REPLACE INTO rollouts VALUES ({', '.join('?' * len(COLUMNS))})"  # noqa: S608 - of our own names


MEMORY = ":memory:"
T = TypeVar("T")


class RolloutIndex:
    """The index of one run; thread-safe, one call at a time."""

    def __init__(self, file: Path, criterion: SuccessCriterion) -> None:
        self.file, self._criterion = file, criterion
        self.rebuilds = 0
        """How often it was rebuilt; earlier results are then invalid."""
        self._lock = Lock()
        self._db = self._open()
        self._closed = False

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._db.close()

    @property
    def count(self) -> int:
        """The number of indexed rollouts."""
        return self._run(self._count)

    def update(self, limit: int = BATCH_ROWS) -> bool:
        """Indexes up to `most` new rollouts; returns False if there are none."""
        return self._run(lambda: self._index_lines(limit))

    def select(self, query: str, values: Iterable[Any] = ()) -> list[dict[str, Any]]:
        """Runs a query; text of users must only be in `given`, the values."""
        values = tuple(values)

        def read() -> list[dict[str, Any]]:
            cursor = self._db.execute(query, values)
            names = [name for name, *_ in cursor.description]
            return [dict(zip(names, row, strict=True)) for row in cursor]

        return self._run(read)

    def execute_many(self, query: str, rows: Iterable[Iterable[Any]]) -> None:
        values = [tuple(row) for row in rows]

        def write() -> None:
            with self._db:
                self._db.executemany(query, values)

        self._run(write)

    def _run(self, act: Callable[[], T]) -> T:
        """Runs a database action; if the file fails, reopens it, and then falls back to memory."""
        with self._lock:
            for reopen in (self._open, lambda: self._connect(MEMORY)):
                try:
                    return act()
                except sqlite3.Error:
                    if self._closed:
                        raise
                    self._db.close()
                    self._db = reopen()
                    self.rebuilds += 1
            return act()

    def _index_lines(self, limit: int) -> bool:
        if self._closed:
            return False
        try:
            text = self.file.open("rb")
        except OSError:
            return False
        with text:
            covered = self._check_covered(text)
            rows: list[Row] = []
            calls: list[Call] = []
            place = self._count()
            for line in iterate_lines(text, covered):
                if not line.is_complete or len(rows) == limit:
                    break
                row, its_calls = self._read_row(place + len(rows), line)
                rows.append(row)
                calls += its_calls
                covered = line.end
            if rows:
                about = [("covered", str(covered)), ("last", sha256(read_line(text, rows[-1])).hexdigest())]
                with self._db:
                    self._db.executemany(INSERT_ROW, rows)
                    self._db.executemany("INSERT INTO calls VALUES (?, ?, ?, ?, ?)", calls)
                    self._db.executemany("INSERT OR REPLACE INTO about VALUES (?, ?)", about)
            return bool(rows)

    def _read_row(self, place: int, line: FileLine) -> tuple[Row, list[Call]]:
        try:
            if line.is_too_long:
                raise ValueError(f"the line has more than {MAX_LINE_BYTES} bytes")
            return read_row(place, line.start, line.data, self._criterion)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            values: Mapping[str, Any] = {
                "place": place, "start": line.start, "end": line.end, "task": "?", "grp": "", "idx": 0,
                "stop": "damaged", "reason": f"{type(error).__name__}: {error}", "tools": "{}", "outcomes": "{}",
                "rewards": "{}", "blame": "", "question": "", "answer": "", "kind": "", "source": "",
            }  # fmt: skip
            return tuple(values.get(name) for name in COLUMNS), []

    def _check_covered(self, text: Any) -> int:
        """The number of indexed bytes; 0, after clearing the index, if the file is not the indexed one."""
        about = dict(self._db.execute("SELECT name, value FROM about"))
        covered = int(about.get("covered", 0))
        if covered and (covered > os.fstat(text.fileno()).st_size or about.get("last") != self._hash_last_line(text)):
            with self._db:
                self._db.execute("DELETE FROM rollouts")
                self._db.execute("DELETE FROM calls")
                self._db.execute("DELETE FROM about WHERE name IN ('covered', 'last')")
            self.rebuilds += 1
            return 0
        return covered

    def _hash_last_line(self, text: Any) -> str:
        row = self._db.execute('SELECT start, "end" FROM rollouts ORDER BY place DESC LIMIT 1').fetchone()
        if row is None:
            return ""
        text.seek(row[0])
        return sha256(text.read(min(row[1] - row[0], MAX_LINE_BYTES))).hexdigest()

    def _count(self) -> int:
        return int(self._db.execute("SELECT COALESCE(MAX(place) + 1, 0) FROM rollouts").fetchone()[0])

    def _open(self) -> sqlite3.Connection:
        index_file = self.file.with_name(f"{self.file.name}.index")
        if self.file.exists() and os.access(index_file.parent, os.W_OK):
            with contextlib.suppress(sqlite3.Error):
                return self._connect(str(index_file))
            with contextlib.suppress(sqlite3.Error, OSError):  # Not an SQLite file, or a damaged one.
                index_file.unlink(missing_ok=True)
                return self._connect(str(index_file))
        return self._connect(MEMORY)

    def _connect(self, where: str) -> sqlite3.Connection:
        db = sqlite3.connect(where, timeout=LOCK_TIMEOUT_S, check_same_thread=False)
        try:
            db.execute("PRAGMA synchronous = OFF")  # A lost index is rebuilt.
            with db:
                db.execute("CREATE TABLE IF NOT EXISTS about (name TEXT PRIMARY KEY, value TEXT)")
                stored = dict(db.execute("SELECT name, value FROM about"))
                expected = {"format": INDEX_FORMAT, "mark": repr(self._criterion)}
                if any(stored.get(name) != value for name, value in expected.items()):
                    db.execute("DROP TABLE IF EXISTS rollouts")
                    db.execute("DROP TABLE IF EXISTS calls")
                    db.execute("DELETE FROM about")
                    db.executemany("INSERT INTO about VALUES (?, ?)", expected.items())
                db.execute(f"CREATE TABLE IF NOT EXISTS rollouts ({COLUMN_DEFINITIONS})")
                db.execute("CREATE INDEX IF NOT EXISTS by_group ON rollouts (grp, idx)")
                db.execute("CREATE INDEX IF NOT EXISTS by_step ON rollouts (step)")
                db.execute(
                    "CREATE TABLE IF NOT EXISTS calls"
                    " (place INTEGER, step INTEGER, tool TEXT, outcome TEXT, seconds REAL)"
                )
                db.execute("CREATE INDEX IF NOT EXISTS calls_by_step ON calls (step)")
                db.execute(
                    "CREATE TEMP TABLE found (words TEXT, place INTEGER, PRIMARY KEY (words, place)) WITHOUT ROWID"
                )
        except BaseException:
            db.close()
            raise
        return db


def read_line(text: Any, row: Row) -> bytes:
    """The line of a row in an open file of rollouts."""
    text.seek(row[1])
    line: bytes = text.read(min(row[2] - row[1], MAX_LINE_BYTES))
    return line
