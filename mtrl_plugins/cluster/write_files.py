"""Writes rendered files into a folder that has nothing else in it."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from gateway.disk_errors import write_atomically
from gateway.errors import ConfigError

MARK = ".rendered-by-mtrl"
"""A file that says that the folder is ours, so that rendering again may replace its files."""
LOGS = "logs"
TOKEN_LINE = re.compile(r"^stringData:\n +token: .*$", re.MULTILINE)
"""Of a secret that was made for the job."""


def write_files(folder: Path, files: Mapping[str, str]) -> None:
    """Writes the files; those of an earlier rendering are replaced, other files are never touched."""
    if folder.exists() and not folder.is_dir():
        raise ConfigError("is a file", file=folder, field="--out", remedy="name a folder")
    known = {MARK, LOGS, *_earlier(folder)}
    others = sorted(item.name for item in folder.iterdir() if item.name not in known) if folder.is_dir() else []
    if others:
        problem = f"has other files: {', '.join(others[:3])}{', ...' if len(others) > 3 else ''}"
        raise ConfigError(problem, file=folder, field="--out", remedy="name an empty or a new folder")
    folder.mkdir(parents=True, exist_ok=True)
    for name in _earlier(folder) - files.keys():
        (folder / name).unlink(missing_ok=True)
    write_atomically(folder / MARK, "".join(f"{name}\n" for name in files).encode())
    for name, text in files.items():
        _write(folder / name, text)


def _write(file: Path, text: str) -> None:
    """Writes a file; one with a token for its owner alone, and with the token of an earlier rendering, which pods that
    run have."""
    if TOKEN_LINE.search(text) is None:
        write_atomically(file, text.encode())
        return
    with suppress(OSError, UnicodeDecodeError):
        if earlier := TOKEN_LINE.search(file.read_text(encoding="utf-8")):
            text = TOKEN_LINE.sub(lambda _: earlier[0], text)
    mask = os.umask(0o077)
    try:
        write_atomically(file, text.encode())
    finally:
        os.umask(mask)


def _earlier(folder: Path) -> set[str]:
    """The files of an earlier rendering, by its mark. A name that leads elsewhere is not one of them."""
    mark = folder / MARK
    lines = mark.read_text(encoding="utf-8").splitlines() if mark.is_file() else []
    return {line for line in lines if line and "/" not in line and line not in (".", "..")}
