"""Explains failed writes: a full disk, a folder that is gone or read-only, and what to do about each."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import get_ident

FULL_ERRNOS = (errno.ENOSPC, errno.EDQUOT)
FULL_WORDS = ("no space left", "quota exceeded", "os error 28", "os error 122", "disk full")
"""How libraries say so whose exceptions have no errno, such as safetensors."""
TOO_LARGE_WORDS = ("file too large", "os error 27")
READ_ONLY_ERRNOS = (errno.EROFS, errno.EACCES, errno.EPERM)
FULL_BELOW_BYTES = 1 << 20
"""A disk with less free space is full, whatever the error says: some libraries only say that a write failed."""


def describe_write_error(file: Path, error: BaseException, then: str) -> str:
    """What happened, where, and the remedy; `then` is what to do once the disk is in order."""
    return f"{file}: cannot be written ({write_error_reason(error)})\n  remedy: {write_error_remedy(file, error, then)}"


def write_error_reason(error: BaseException) -> str:
    """The system's words for the error, where it has any."""
    for cause in _causes(error):
        if isinstance(cause, OSError) and cause.strerror:
            return cause.strerror
    if isinstance(error, shutil.Error):  # Of several files, each with its paths and the words of its error.
        (_, _, text), *_ = error.args[0]
        return str(text).partition("] ")[2].partition(":")[0] or str(text)
    return str(error) or type(error).__name__


def write_error_remedy(file: Path, error: BaseException, then: str) -> str:
    """What to do about an error that came from writing to a file or folder."""
    folder = _existing_folder(file)
    if _says(error, (errno.EFBIG,), TOO_LARGE_WORDS):
        return f"raise the limit on the size of files (`ulimit -f`, or that of {_mount(folder)}), {then}"
    if is_disk_full(error, folder):
        return f"make room on {_mount(folder)} ({_format_free(folder)} free), {then}"
    if _has_errno(error, READ_ONLY_ERRNOS):
        return f"make {folder} writable for this user, {then}"
    if _has_errno(error, (errno.ENOENT, errno.ENOTDIR)):
        return f"{file.parent} was removed while it was in use: restore it from a copy, {then}"
    return f"check the disk of {folder} ({_format_free(folder)} free), {then}"


def is_disk_full(error: BaseException, folder: Path) -> bool:
    """Whether the disk of a folder is full; not every library says so with an errno."""
    if _says(error, FULL_ERRNOS, FULL_WORDS):
        return True
    named = any(isinstance(cause, OSError) and cause.errno for cause in _causes(error))
    return not named and _free_bytes(_existing_folder(folder)) < FULL_BELOW_BYTES


def require_linked(descriptor: int, file: Path) -> None:
    """Raises OSError if an open file was removed: what is written to it is lost, and nothing says so."""
    if not os.fstat(descriptor).st_nlink:
        raise FileNotFoundError(errno.ENOENT, "it was removed while it was in use", str(file))


@contextmanager
def require_same_folder(folder: Path) -> Iterator[None]:
    """Raises OSError at the end of the block if the folder was removed meanwhile, even if it was made anew."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        yield
        require_linked(handle, folder)
    finally:
        os.close(handle)


def write_atomically(file: Path, data: bytes, *, sync: bool = True) -> None:
    """Writes a file and renames it into place once it is on the disk: a crash leaves the old file or the new one.

    Without `sync` this holds for crashes of the process, but not for a power cut.
    """
    temporary = file.with_name(f".{file.name}.{os.getpid()}.{get_ident()}")
    try:
        with temporary.open("wb") as stream:
            stream.write(data)
            stream.flush()
            if sync:
                os.fsync(stream.fileno())
        temporary.replace(file)
        if sync:
            sync_path(file.parent)
    finally:
        temporary.unlink(missing_ok=True)


def sync_path(path: Path) -> None:
    """Waits until the content of a file or folder is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The error and what caused it."""
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        yield cause
        cause = cause.__cause__ or cause.__context__


def _says(error: BaseException, errnos: tuple[int, ...], words: tuple[str, ...]) -> bool:
    """Whether the error has one of these errnos or contains one of these words."""
    return _has_errno(error, errnos) or any(word in str(cause).lower() for cause in _causes(error) for word in words)


def _has_errno(error: BaseException, errnos: tuple[int, ...]) -> bool:
    return any(isinstance(cause, OSError) and cause.errno in errnos for cause in _causes(error))


def _existing_folder(path: Path) -> Path:
    """The innermost folder of a path that exists."""
    return next(folder for folder in (path.absolute(), *path.absolute().parents) if folder.is_dir())


def _mount(folder: Path) -> Path:
    """Where the disk of a folder is mounted."""
    folder = folder.resolve()
    while not folder.is_mount():
        folder = folder.parent
    return folder


def _free_bytes(folder: Path) -> int:
    state = os.statvfs(folder)
    return state.f_bavail * state.f_frsize


def _format_free(folder: Path) -> str:
    return f"{_free_bytes(folder) / 2**20:,.0f} MB"
