"""A run of 50,000 rollouts is listed at once because each was read once: what a table shows of it is kept.

`rollouts.jsonl.index` beside the rollouts is an SQLite file. It grows with them, is made anew where it is of other
rollouts, and can be deleted at any time. Where a run may only be read, or there is no room, it is kept in memory.
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

from trainer.page.summary import COLUMNS, Row, row
from trainer.view.mark import Mark

FORMAT = "3"
BATCH = 64
"""Rollouts between which others may ask."""
WAIT_S = 5.0
"""For another viewer of the same run."""
NUMBERS = frozenset(
    {
        "place",
        "start",
        "end",
        "step",
        "idx",
        "success",
        "turns",
        "tokens",
        "written",
        "asked",
        "cached",
        "calls",
        "version",
    }
)
REALS = frozenset({"reward", "seconds"})
MAKE = ", ".join(
    f'"{name}" {"INTEGER" if name in NUMBERS else "REAL" if name in REALS else "TEXT"}'
    f"{' PRIMARY KEY' if name == 'place' else ''}"
    for name in COLUMNS
)
PUT = f"INSERT OR REPLACE INTO rollouts VALUES ({', '.join('?' * len(COLUMNS))})"  # noqa: S608 - of our own names


MEMORY = ":memory:"
T = TypeVar("T")


class Index:
    """Any thread may ask; one at a time is heard."""

    def __init__(self, file: Path, mark: Mark) -> None:
        self.file, self._mark = file, mark
        self.begun = 0
        """How often it was made anew: whoever remembers something of it has to forget that then."""
        self._lock = Lock()
        self._db = self._opened()
        self._closed = False

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._db.close()

    @property
    def known(self) -> int:
        """Rollouts that are listed."""
        return self._heard(self._count)

    def grow(self, most: int = BATCH) -> bool:
        """Reads so many more rollouts at the most; False once there are none."""
        return self._heard(lambda: self._grown(most))

    def ask(self, query: str, given: Iterable[Any] = ()) -> list[dict[str, Any]]:
        """`query` is ours, and what others wrote is only ever in `given`."""
        values = tuple(given)
        return self._heard(lambda: self._asked(query, values))

    def put(self, query: str, given: Iterable[Iterable[Any]]) -> None:
        values = [tuple(one) for one in given]
        self._heard(lambda: self._put(query, values))

    def _heard(self, act: Callable[[], T]) -> T:
        """Where the file is gone, spoilt or has no room it is opened again, and then done without."""
        with self._lock:
            for opened in (self._opened, lambda: self._made(MEMORY)):
                try:
                    return act()
                except sqlite3.Error:
                    if self._closed:
                        raise
                    self._db.close()
                    self._db = opened()
                    self.begun += 1
            return act()

    def _asked(self, query: str, given: tuple[Any, ...]) -> list[dict[str, Any]]:
        asked = self._db.execute(query, given)
        names = [name for name, *_ in asked.description]
        return [dict(zip(names, one, strict=True)) for one in asked]

    def _put(self, query: str, given: list[tuple[Any, ...]]) -> None:
        with self._db:
            self._db.executemany(query, given)

    def _grown(self, most: int) -> bool:
        if self._closed:
            return False
        try:
            text = self.file.open("rb")
        except OSError:
            return False
        with text:
            covered = self._covered(text)
            text.seek(covered)
            found: list[Row] = []
            place = self._count()
            for line in text:
                if not line.endswith(b"\n") or len(found) == most:
                    break
                found.append(self._row(place + len(found), covered, line))
                covered += len(line)
            if found:
                self._keep(found, covered, line_of(text, found[-1]))
            return bool(found)

    def _row(self, place: int, start: int, line: bytes) -> Row:
        try:
            return row(place, start, line, self._mark)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            told: Mapping[str, Any] = {
                "place": place, "start": start, "end": start + len(line), "task": "?", "grp": "", "idx": 0,
                "stop": "damaged", "reason": f"{type(error).__name__}: {error}", "tools": "{}", "outcomes": "{}",
                "rewards": "{}", "blame": "", "question": "", "answer": "", "kind": "",
            }  # fmt: skip
            return tuple(told.get(name) for name in COLUMNS)

    def _covered(self, text: Any) -> int:
        """Up to where the file is known; nothing of it where it is another one than was read."""
        told = dict(self._db.execute("SELECT name, value FROM about"))
        covered = int(told.get("covered", 0))
        if covered and (covered > os.fstat(text.fileno()).st_size or told.get("last") != self._last(text)):
            with self._db:
                self._db.execute("DELETE FROM rollouts")
                self._db.execute("DELETE FROM about WHERE name IN ('covered', 'last')")
            self.begun += 1
            return 0
        return covered

    def _last(self, text: Any) -> str:
        found = self._db.execute('SELECT start, "end" FROM rollouts ORDER BY place DESC LIMIT 1').fetchone()
        if found is None:
            return ""
        text.seek(found[0])
        return sha256(text.read(found[1] - found[0])).hexdigest()

    def _keep(self, found: list[Row], covered: int, last: bytes) -> None:
        with self._db:
            self._db.executemany(PUT, found)
            about = [("covered", str(covered)), ("last", sha256(last).hexdigest())]
            self._db.executemany("INSERT OR REPLACE INTO about VALUES (?, ?)", about)

    def _count(self) -> int:
        return int(self._db.execute("SELECT COALESCE(MAX(place) + 1, 0) FROM rollouts").fetchone()[0])

    def _opened(self) -> sqlite3.Connection:
        beside = self.file.with_name(f"{self.file.name}.index")
        if self.file.exists() and os.access(beside.parent, os.W_OK):
            with contextlib.suppress(sqlite3.Error):
                return self._made(str(beside))
            with contextlib.suppress(sqlite3.Error, OSError):  # A file of something else, or half a one.
                beside.unlink(missing_ok=True)
                return self._made(str(beside))
        return self._made(MEMORY)

    def _made(self, where: str) -> sqlite3.Connection:
        db = sqlite3.connect(where, timeout=WAIT_S, check_same_thread=False)
        try:
            db.execute("PRAGMA synchronous = OFF")  # What is lost is made anew.
            with db:
                db.execute("CREATE TABLE IF NOT EXISTS about (name TEXT PRIMARY KEY, value TEXT)")
                kept = dict(db.execute("SELECT name, value FROM about"))
                same = {"format": FORMAT, "mark": repr(self._mark)}
                if any(kept.get(name) != value for name, value in same.items()):
                    db.execute("DROP TABLE IF EXISTS rollouts")
                    db.execute("DELETE FROM about")
                    db.executemany("INSERT INTO about VALUES (?, ?)", same.items())
                db.execute(f"CREATE TABLE IF NOT EXISTS rollouts ({MAKE})")
                db.execute("CREATE INDEX IF NOT EXISTS by_group ON rollouts (grp, idx)")
                db.execute("CREATE INDEX IF NOT EXISTS by_step ON rollouts (step)")
                db.execute(
                    "CREATE TEMP TABLE found (words TEXT, place INTEGER, PRIMARY KEY (words, place)) WITHOUT ROWID"
                )
        except BaseException:
            db.close()
            raise
        return db


def line_of(text: Any, one: Row) -> bytes:
    """Its bytes, in an open file of rollouts."""
    text.seek(one[1])
    found: bytes = text.read(one[2] - one[1])
    return found
