"""Prepared states: folders or archives that rollouts begin from as copies, so that nothing ever writes to them."""

from __future__ import annotations

import os
import shutil
import tarfile
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import anyio
from anyio import to_thread

from gateway.errors import SessionError, Unavailable
from gateway.state import MAX_NAME
from gateway.state.git_content import StateTooLarge
from gateway.state.state_hash import hash_state
from gateway.state.unpack_tar import unpack_tar
from gateway.types import Task

ARCHIVES = (".tar", ".tar.gz", ".tgz", ".tar.xz", ".tar.bz2", ".zip")
MAX_ARCHIVE_BYTES = 4 * 2**30
LARGE_BYTES, LARGE_FILES = 2**24, 1_000
"""A copy of more takes a while."""
HASH_S = 50.0
"""Less than a session's limit for its last rewards."""
_FICLONE = 0x40049409
"""The ioctl by which a file shares the blocks of another until one of them is written to."""


class StateError(Exception):
    """A prepared state cannot be used; the text is for the operator."""


def is_prepared_state(path: Path) -> bool:
    """Whether a path is one of a folder or an archive."""
    return path.is_dir() or (path.is_file() and path.name.endswith(ARCHIVES))


def find_prepared_state(default: Path | None, states: Path | None, name: str) -> Path | None:
    """The state of a rollout: the one of this name in the folder of states; the default without a name or a folder.

    The name comes from a task and may have been sent by a client: it never leads out of the folder.
    """
    if not name or states is None:
        return default
    parts = PurePosixPath(name).parts
    if len(name) > MAX_NAME or "\0" in name or name.startswith("/") or ".." in parts or not parts:
        raise StateError(f"{name!r:.{MAX_NAME}} is not the name of a state: write one without `..` or a leading `/`")
    root = states.resolve()
    for ending in ("", *ARCHIVES):
        path = root / f"{name}{ending}"
        if is_prepared_state(path) and path.resolve().is_relative_to(root):
            return path
    known = ", ".join(sorted(entry.name for entry in root.iterdir())[:20]) if root.is_dir() else ""
    raise StateError(f"there is no state {name!r} in {states}; there are: {known or 'none'}")


def copy_state(state: Path, folder: Path) -> None:
    """Copies a prepared state into an empty folder; blocks are shared where the file system can. Raises StateError."""
    try:
        if state.is_dir():
            shutil.copytree(state, folder, symlinks=True, copy_function=_clone, dirs_exist_ok=True)
        else:
            _extract(state, folder)
    except (OSError, shutil.Error, tarfile.TarError, zipfile.BadZipFile) as error:
        raise StateError(f"its `state` cannot be copied: {error}") from error


class FullCopy(NamedTuple):
    """A copy of a state."""

    reason: str
    """Why it shares no blocks with the state; empty if it does, or if the state has no content."""
    bytes: int
    files: int

    @property
    def is_large(self) -> bool:
        """Whether it takes a while."""
        return self.bytes >= LARGE_BYTES or self.files >= LARGE_FILES


def find_full_copy(state: Path) -> FullCopy:
    """How copies of a state are made; raises OSError where it cannot be read."""
    if not state.is_dir():
        return FullCopy("it is an archive", state.stat().st_size, 1)
    files = [Path(folder, name) for folder, _, names in os.walk(state) for name in names]
    sizes = {file: file.stat().st_size for file in files if file.is_file() and not file.is_symlink()}
    sample = next((file for file, size in sizes.items() if size), None)
    if sample is None:
        return FullCopy("", 0, len(files))
    total = sum(sizes.values())
    with tempfile.TemporaryDirectory(prefix="mtrl-state-") as folder:
        try:
            _share_blocks(sample, Path(folder) / "copy")
        except (ImportError, OSError):
            reason = f"the file system of {tempfile.gettempdir()} shares no blocks with it"
            return FullCopy(reason, total, len(files))
    return FullCopy("", total, len(files))


class PreparedStates:
    """The prepared states of a server or sandbox, with the hashes of those that rollouts end with unchanged."""

    def __init__(self, default: Path | None, states: Path | None, ignore: Sequence[str] = ()) -> None:
        self.default, self.states, self.ignore = default, states, tuple(ignore)
        self._hashes: dict[Path | None, str] = {}

    def find(self, name: str) -> Path | None:
        """The state for a task that names one, or none; raises StateError."""
        return find_prepared_state(self.default, self.states, name)

    def find_resolved(self, name: str) -> Path | None:
        """The state of a rollout, without links on the way to it; raises Unavailable."""
        try:
            state = self.find(name)
            return state and state.resolve()
        except (StateError, OSError) as error:
            raise Unavailable(f"the `state` cannot be put into the sandbox: {error}") from error

    def names(self) -> tuple[str, ...]:
        """The names of the states in the folder of states."""
        found = [] if self.states is None else sorted(self.states.iterdir())
        endings = {path: next((end for end in ARCHIVES if path.name.endswith(end)), "") for path in found}
        usable = (path for path in found if is_prepared_state(path) and not path.name.startswith("."))
        return tuple(dict.fromkeys(path.name.removesuffix(endings[path]) for path in usable))

    def examples(self) -> tuple[Path, ...]:
        """The default and the first of the named states."""
        named = [self.find(name) for name in self.names()[:1]]
        return tuple(dict.fromkeys(path.resolve() for path in (self.default, *named) if path is not None))

    def check(self, task: Task, owner: str) -> None:
        """Raises SessionError if the task names a state that there is not."""
        try:
            self.find(task.state)
        except (StateError, OSError, ValueError) as error:
            raise SessionError(f"{owner}: {error}") from error

    async def hash_folder(self, folder: Path) -> str:
        """The hash of a rollout's folder. One with more content than is hashed has a hash that no state has.

        Raises Unavailable where it cannot be read.
        """
        try:
            with anyio.fail_after(HASH_S):
                return await to_thread.run_sync(hash_state, folder, self.ignore, abandon_on_cancel=True)
        except StateTooLarge as error:
            return f"too large: {error}"
        except (OSError, TimeoutError) as error:
            raise Unavailable(f"the state at the end cannot be hashed: {error or 'it takes too long'}") from error

    async def hash_prepared(self, name: str) -> str:
        """The hash of a state as it was prepared, which is that of a rollout that changed nothing."""
        state = self.find(name)
        if state not in self._hashes:
            self._hashes[state] = await self._hash_copy(state)
        return self._hashes[state]

    async def _hash_copy(self, state: Path | None) -> str:
        if state is not None and not state.name.endswith(ARCHIVES):
            return await self.hash_folder(state)
        with tempfile.TemporaryDirectory(prefix="mtrl-state-") as folder:
            if state is not None:
                await to_thread.run_sync(copy_state, state, Path(folder), abandon_on_cancel=True)
            return await self.hash_folder(Path(folder))


def _extract(archive: Path, folder: Path) -> None:
    if archive.name.endswith(".zip"):
        with zipfile.ZipFile(archive) as zipped:
            _check_size(archive, [member.file_size for member in zipped.infolist()])
            zipped.extractall(folder)  # noqa: S202 - it keeps members inside
        return
    with tarfile.open(archive) as tar:
        _check_size(archive, [member.size for member in tar.getmembers()])
        unpack_tar(tar, folder)


def _check_size(archive: Path, sizes: Sequence[int]) -> None:
    if sum(sizes) > MAX_ARCHIVE_BYTES:
        raise OSError(f"{archive} holds more than {MAX_ARCHIVE_BYTES // 2**30} GB")


def _clone(source: str, target: str) -> None:
    """Copies a file; where the file system can, its blocks are shared, which takes no time."""
    if not Path(source).is_file():  # Opening a pipe would wait for its other end.
        raise shutil.SpecialFileError(f"{source} is no regular file")
    try:
        _share_blocks(Path(source), Path(target))
        shutil.copystat(source, target)
    except (ImportError, OSError):
        shutil.copy2(source, target)


def _share_blocks(source: Path, target: Path) -> None:
    """Makes a file of the same blocks; raises ImportError or OSError where that cannot be done."""
    from fcntl import ioctl

    with source.open("rb") as read, target.open("wb") as write:
        ioctl(write.fileno(), _FICLONE, read.fileno())
