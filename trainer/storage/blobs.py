"""A content-addressed folder: each image, video or other blob of a run is stored once, under its sha256."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path

from gateway.disk_errors import write_atomically


class BlobFolder:
    """A folder with one file per blob, safe for several threads and processes: equal names mean equal bytes."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def put(self, data: bytes) -> str:
        digest = sha256(data).hexdigest()
        file = self.path / digest
        if not (file.exists() and file.stat().st_size == len(data)):  # A power cut may leave a short one.
            self.path.mkdir(exist_ok=True)  # Its parent is the run, which is not made anew if it was removed.
            write_atomically(file, data, sync=False)
        return digest

    def get(self, digest: str) -> bytes:
        if len(digest) != 64 or not digest.isalnum():
            raise ValueError(f"{digest[:80]!r} is not a sha256")  # This also rejects paths out of the folder.
        file = self.path / digest
        try:
            data = file.read_bytes()
        except OSError as error:
            raise ValueError(f"{file} cannot be read ({error.strerror})") from error
        if sha256(data).hexdigest() != digest:
            raise ValueError(f"{file} is damaged: its content does not match the sha256 in its name")
        return data
