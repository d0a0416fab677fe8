"""A checkpoint is there whole or not at all; whoever goes on from one has looked at every byte of it.

RUN/checkpoints/000012/          the model as `save_pretrained` writes it, the optimizer, and
RUN/checkpoints/000012/state.json    where the run stood, and the sha256 of every other file
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from hashlib import file_digest
from pathlib import Path
from typing import Any

NAME = "checkpoints"
STATE = "state.json"
BESIDE = ".writing"


class CheckpointError(Exception):
    """A checkpoint that cannot be written or read. Its text is complete: what, where, and how to mend it."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Where a run stood after a step."""

    step: int
    folder: Path
    state: Mapping[str, Any]


class Checkpoints:
    def __init__(self, run: Path, keep: int = 2) -> None:
        self.folder, self.keep = run / NAME, keep

    def save(self, step: int, state: Mapping[str, Any], write: Callable[[Path], None]) -> Path:
        """`write` puts the files into a folder; the older ones go once the new one is safe on the disk."""
        whole, beside = self.folder / f"{step:06}", self.folder / BESIDE
        try:
            shutil.rmtree(beside, ignore_errors=True)
            beside.mkdir(parents=True)
            write(beside)
            digests = {file.relative_to(beside).as_posix(): _digest(file) for file in _files(beside)}
            told = {"step": step, "state": state, "files": digests}
            (beside / STATE).write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
            for file in [*_files(beside), beside]:
                _sync(file)
            shutil.rmtree(whole, ignore_errors=True)  # Of a run that went back to an earlier step.
            beside.rename(whole)
            _sync(self.folder)
        except Exception as error:  # boundary: a full disk is another error in each format that is written
            shutil.rmtree(beside, ignore_errors=True)
            raise CheckpointError(self._unwritten(step, error)) from error
        for old in self._all()[: -self.keep]:
            shutil.rmtree(old, ignore_errors=True)
        return whole

    def latest(self, told: Callable[[str], None] = lambda _: None) -> Checkpoint | None:
        """The newest one that is whole; `told` hears why newer ones are not. None where there never was any."""
        found = self._all()
        for folder in reversed(found):
            try:
                return _read(folder)
            except CheckpointError as error:
                told(f"{error}; going on from the one before it")
        if found:
            remedy = "restore one of them from a copy, or start again with another --out"
            raise CheckpointError(f"{self.folder}: none of {len(found)} checkpoints is whole\n  remedy: {remedy}")
        return None

    def before(self, step: int) -> Checkpoint | None:
        """The newest whole one of an earlier step."""
        for folder in reversed(self._all()):
            if int(folder.name) < step:
                return _read(folder)
        return None

    def _all(self) -> list[Path]:
        return sorted(folder for folder in self.folder.glob("[0-9]*") if folder.is_dir())

    def _unwritten(self, step: int, error: Exception) -> str:
        full = getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT)
        remedy = "make room on the disk" if full else "look at the disk's room and the folder's owner"
        why = getattr(error, "strerror", None) or error
        stands = self._all()
        kept = f"that of step {int(stands[-1].name)} stands" if stands else "there is none yet"
        return (
            f"{self.folder}: the checkpoint of step {step} cannot be written ({why}); {kept}\n"
            f"  remedy: {remedy}, then go on with --resume"
        )


def _read(folder: Path) -> Checkpoint:
    try:
        told = json.loads((folder / STATE).read_text(encoding="utf-8"))
        step, state, digests = int(told["step"]), told["state"], dict(told["files"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{folder / STATE} cannot be read ({type(error).__name__})") from error
    for name, digest in digests.items():
        file = folder / name
        if not file.is_file():
            raise CheckpointError(f"{file} is missing")
        if _digest(file) != digest:
            raise CheckpointError(f"{file} is not what was written")
    return Checkpoint(step, folder, state)


def _files(folder: Path) -> Iterator[Path]:
    return (file for file in sorted(folder.rglob("*")) if file.is_file())


def _digest(file: Path) -> str:
    with file.open("rb") as opened:
        return file_digest(opened, "sha256").hexdigest()


def _sync(path: Path) -> None:
    """On the disk, not only on its way there."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
