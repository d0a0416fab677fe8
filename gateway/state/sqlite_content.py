"""The content of an SQLite database: its schema and rows, whatever the order of its pages. It is read in memory."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Mapping
from hashlib import sha256

MAGIC = b"SQLite format 3\0"
SIDE_FILES = ("-wal", "-shm", "-journal")
JOURNAL_MAGIC = bytes.fromhex("d9d505f920a163d7")
READ_S = 20.0
STEPS = 10_000
"""Instructions of SQLite between two looks at the clock."""
MAX_VALUE_BYTES = 64 * 2**20
_WAL_HEADER, _FRAME_HEADER = 32, 24
_VERSIONS = slice(18, 20)
"""The bytes of the header that say whether the database has a write-ahead log."""
_QUERY = "SELECT type, name, sql FROM sqlite_master WHERE sql IS NOT NULL ORDER BY type, name"


def digest_database(content: bytes, sides: Mapping[str, bytes]) -> bytes | None:
    """The digest of a database's schema and rows; None if it cannot be read as one, so that its bytes count."""
    if sides.get("-journal", b"").startswith(JOURNAL_MAGIC):
        return None  # A transaction is open.
    pages = apply_log(content, sides.get("-wal", b""))
    connection = sqlite3.connect(":memory:")
    try:
        connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MAX_VALUE_BYTES)
        connection.deserialize(bytes(pages))
        deadline = time.monotonic() + READ_S
        connection.set_progress_handler(lambda: int(time.monotonic() > deadline), STEPS)
        connection.execute("PRAGMA trusted_schema = OFF")
        connection.text_factory = bytes
        return _digest(connection)
    except sqlite3.Error:
        return None
    finally:
        connection.close()


def apply_log(content: bytes, log: bytes) -> bytearray:
    """The pages of a database with what its write-ahead log has committed."""
    pages = bytearray(content)
    pages[_VERSIONS] = b"\1\1"
    if len(log) < _WAL_HEADER:
        return pages
    size, salts = int.from_bytes(log[8:12], "big"), log[16:24]
    pending: dict[int, bytes] = {}
    for start in range(_WAL_HEADER, len(log) - size - _FRAME_HEADER + 1, size + _FRAME_HEADER):
        head = log[start : start + _FRAME_HEADER]
        if size < 512 or head[8:16] != salts:
            break
        number, total = int.from_bytes(head[:4], "big"), int.from_bytes(head[4:8], "big")
        pending[number] = log[start + _FRAME_HEADER : start + _FRAME_HEADER + size]
        if total and max(pending) <= total <= len(content) // size + len(log) // size + 1:  # The end of a transaction.
            pages.extend(bytes(max(0, total * size - len(pages))))
            for page, data in pending.items():
                pages[(page - 1) * size : page * size] = data
            del pages[total * size :]
            pages[_VERSIONS] = b"\1\1"
            pending = {}
    return pages


def _digest(connection: sqlite3.Connection) -> bytes:
    digest = sha256()
    for kind, name, sql in connection.execute(_QUERY).fetchall():
        digest.update(repr((kind, name, b" ".join(sql.split()))).encode())
        if kind == b"table" and not sql.upper().lstrip().startswith(b"CREATE VIRTUAL"):
            for row in sorted(_row_digests(connection, name)):
                digest.update(row)
    return digest.digest()


def _row_digests(connection: sqlite3.Connection, table: bytes) -> list[bytes]:
    """A digest of each row, of the columns that are stored and not computed."""
    quoted = _quote(table)
    columns = [_quote(row[1]) for row in connection.execute(f"PRAGMA table_xinfo({quoted})") if row[6] == 0]
    rows = connection.execute(f"SELECT {', '.join(columns)} FROM {quoted}")  # noqa: S608 - names are quoted
    return [sha256(repr(row).encode()).digest() for row in rows]


def _quote(name: bytes) -> str:
    return '"' + name.decode("utf-8", "surrogateescape").replace('"', '""') + '"'
