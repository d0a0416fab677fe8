"""The hash of a folder's content: names, bytes, links, executable bits; of databases their rows, of git its history.

Two rollouts that did the same have the same hash: times, owners, the path of the rollout's folder, and how SQLite and
git arrange their files do not count. What is hashed was written by others: no link is followed, no pipe is
opened, no program is configured by it, and its size is bounded.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from hashlib import sha256
from pathlib import Path

from gateway.state.git_content import StateTooLarge, digest_repository, is_repository
from gateway.state.sqlite_content import MAGIC, SIDE_FILES, digest_database
from gateway.types import STATE_HASH_PREFIX as PREFIX

MAX_ENTRIES = 50_000
MAX_BYTES = 512 * 2**20
MAX_DEPTH = 64
POLICY_PATH = "/rollout"
"""The path of a rollout's folder as the policy knows it."""


def hash_state(folder: Path, ignore: Sequence[str] = ()) -> str:
    """The hash of a folder. `ignore` are patterns for names, or for paths in the folder, that do not count.

    Raises StateTooLarge, and OSError where the folder cannot be read.
    """
    return _FolderHash(folder, tuple(ignore), os.fsencode(folder)).compute()


def has_hash_form(text: str) -> bool:
    """Whether a text is a hash and not the path of a folder."""
    return text.startswith(PREFIX)


@dataclass
class _FolderHash:
    folder: Path
    ignore: tuple[str, ...]
    root: bytes
    entries: int = 0
    bytes_left: int = field(default_factory=lambda: MAX_BYTES)

    def compute(self) -> str:
        digest = sha256()
        for line in self._lines("", MAX_DEPTH):
            digest.update(len(line).to_bytes(8, "big") + line)
        return PREFIX + digest.hexdigest()

    def _lines(self, inside: str, depth: int) -> Iterator[bytes]:
        """One line for each entry below a folder, in the order of their names."""
        if depth == 0:
            raise StateTooLarge(f"more than {MAX_DEPTH} folders within each other")
        with os.scandir(self.folder / inside) as found:
            names = self._count(found)
        for name in names:
            path = f"{inside}/{name}" if inside else name
            if not any(fnmatchcase(name, pattern) or fnmatchcase(path, pattern) for pattern in self.ignore):
                yield from self._entry_lines(path, names, depth)

    def _count(self, found: Iterator[os.DirEntry[str]]) -> list[str]:
        names = []
        for entry in found:
            self.entries += 1
            if self.entries > MAX_ENTRIES:
                raise StateTooLarge(f"more than {MAX_ENTRIES:,} files")
            names.append(entry.name)
        return sorted(names, key=os.fsencode)

    def _entry_lines(self, path: str, siblings: Sequence[str], depth: int) -> Iterator[bytes]:
        place = self.folder / path
        mode, name = place.lstat().st_mode, os.fsencode(path)
        if stat.S_ISLNK(mode):
            yield b"link\0" + name + b"\0" + self._shown(os.fsencode(os.readlink(place)))
        elif stat.S_ISDIR(mode) and is_repository(place):
            yield b"git\0" + name + b"\0" + digest_repository(place)
        elif stat.S_ISDIR(mode):
            yield b"folder\0" + name
            yield from self._lines(path, depth - 1)
        elif stat.S_ISSOCK(mode):
            return  # It is nothing without its process, and archives have none.
        elif not stat.S_ISREG(mode):
            yield b"special\0" + name
        elif not self._belongs_to_database(path, siblings):
            kind = b"program\0" if mode & stat.S_IXUSR else b"file\0"
            yield kind + name + b"\0" + self._digest_file(place)

    def _belongs_to_database(self, path: str, siblings: Sequence[str]) -> bool:
        """Whether a file is a database's own log, which is read with the database."""
        ending = next((ending for ending in SIDE_FILES if path.endswith(ending)), None)
        if ending is None or Path(path).name.removesuffix(ending) not in siblings:
            return False
        return self._read(self.folder / path.removesuffix(ending), len(MAGIC)) == MAGIC

    def _digest_file(self, file: Path) -> bytes:
        content = self._read(file, self.bytes_left + 1)
        self.bytes_left -= len(content)
        if self.bytes_left < 0:
            raise StateTooLarge(f"more than {MAX_BYTES // 2**20} MB")
        if content.startswith(MAGIC) and (rows := digest_database(content, self._side_file(file))) is not None:
            return b"database\0" + rows
        return sha256(self._shown(content)).digest()

    def _side_file(self, file: Path) -> dict[str, bytes]:
        sides = {}
        for ending in SIDE_FILES:
            place = file.with_name(file.name + ending)
            if place.is_file() and not place.is_symlink():
                sides[ending] = self._read(place, self.bytes_left + 1)
                self.bytes_left -= len(sides[ending])
        return sides

    def _shown(self, content: bytes) -> bytes:
        """The content with the folder's path as the policy knows it, since the path differs between rollouts."""
        return content.replace(self.root, POLICY_PATH.encode())

    @staticmethod
    def _read(file: Path, most: int) -> bytes:
        """The first bytes of a regular file; a link or a pipe that has taken its place is not opened."""
        try:
            descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except FileNotFoundError:
            return b""
        with open(descriptor, "rb") as opened:
            return opened.read(most) if stat.S_ISREG(os.fstat(descriptor).st_mode) else b""
