"""Bytes are written once, under their sha256: a picture that a hundred rollouts were shown is one file."""

from __future__ import annotations

import os
from hashlib import sha256
from pathlib import Path
from threading import get_ident


class Folder:
    """A folder with one file for each blob. What another thread or process puts there meanwhile is the same."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def put(self, data: bytes) -> str:
        digest = sha256(data).hexdigest()
        file = self.path / digest
        if not file.exists():
            self.path.mkdir(parents=True, exist_ok=True)
            write_whole(file, data)
        return digest

    def get(self, digest: str) -> bytes:
        if len(digest) != 64 or not digest.isalnum():
            raise ValueError(f"{digest[:80]!r} is no sha256")  # Nor a way out of the folder.
        file = self.path / digest
        try:
            data = file.read_bytes()
        except OSError as error:
            raise ValueError(f"{file} cannot be read ({error.strerror})") from error
        if sha256(data).hexdigest() != digest:
            raise ValueError(f"{file} is damaged: its bytes are not those that its name says")
        return data


def write_whole(file: Path, data: bytes) -> None:
    """The file is there whole or not at all, whoever looks and whenever this ends."""
    part = file.with_name(f".{file.name}.{os.getpid()}.{get_ident()}")
    try:
        part.write_bytes(data)
        part.replace(file)
    finally:
        part.unlink(missing_ok=True)
