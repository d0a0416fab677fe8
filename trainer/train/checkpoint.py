"""Writes and reads checkpoints: each is complete or absent, and every byte is verified before a run resumes from it.

RUN/checkpoints/000012/          the model as `save_pretrained` writes it, the optimizer, and
RUN/checkpoints/000012/state.json    the run's state, and the sha256 of every other file
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from hashlib import file_digest
from pathlib import Path
from typing import Any

from gateway.disk_errors import require_same_folder, sync_path, write_error_reason, write_error_remedy
from trainer.policy.errors import PolicyError
from trainer.storage.rollout_file import resume_hint

CHECKPOINTS_FOLDER = "checkpoints"
STATE_FILE = "state.json"
TEMPORARY_FOLDER = ".writing"


class CheckpointError(Exception):
    """A checkpoint that cannot be written or read. The message says what, where, and how to fix it."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A verified checkpoint of the state after a step."""

    step: int
    folder: Path
    state: Mapping[str, Any]


class Checkpoints:
    """The checkpoints of a run; the latest `keep` are kept."""

    def __init__(self, run: Path, keep: int = 2) -> None:
        self.folder, self.keep = run / CHECKPOINTS_FOLDER, keep
        self.best_step: int | None = None
        """The step of a checkpoint that is kept as well."""

    def save(self, step: int, state: Mapping[str, Any], write: Callable[[Path], None]) -> Path:
        """Saves a checkpoint, whose files `write` puts into a folder. Older ones are deleted once it is on the disk."""
        final, temporary = self.folder / f"{step:06}", self.folder / TEMPORARY_FOLDER
        replaced = self.folder / f".replaced-{step:06}"
        try:
            shutil.rmtree(replaced, ignore_errors=True)
            shutil.rmtree(temporary, ignore_errors=True)
            self.folder.mkdir(exist_ok=True)  # Its parent is the run, which is not made anew if it was removed.
            with require_same_folder(self.folder):
                temporary.mkdir()
                write(temporary)
            digests = {file.relative_to(temporary).as_posix(): _digest(file) for file in _list_files(temporary)}
            content = {"step": step, "state": state, "files": digests}
            (temporary / STATE_FILE).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
            for file in [*_list_files(temporary), temporary]:
                sync_path(file)
            if final.exists():  # Left by a run that went back to an earlier step.
                final.rename(replaced)
            temporary.rename(final)
            sync_path(self.folder)
            shutil.rmtree(replaced, ignore_errors=True)
        except Exception as error:  # boundary: each file format reports a full disk in its own way
            message = self._describe_write_error(step, error)  # Before the disk has room again.
            shutil.rmtree(temporary, ignore_errors=True)
            if replaced.is_dir() and not final.exists():
                replaced.rename(final)
            for folder in (self.folder, self.folder.parent):  # If the run was removed, `write` may have made them.
                with suppress(OSError):
                    folder.rmdir()
            if isinstance(error, PolicyError):  # Such as a lost rank, which has nothing to do with the disk.
                raise
            raise CheckpointError(message) from error
        for old in self._list_all()[: -self.keep]:
            if int(old.name) != self.best_step:
                shutil.rmtree(old, ignore_errors=True)
        return final

    def find_latest(self, warn: Callable[[str], None] = lambda _: None) -> Checkpoint | None:
        """The newest intact checkpoint; warns about newer ones that are not. None if there are no checkpoints."""
        folders = self._list_all()
        for folder in reversed(folders):
            try:
                return _load_verified(folder)
            except CheckpointError as error:
                warn(f"{error}; using the previous checkpoint")
        if folders:
            remedy = "restore one of them from a copy, or start again with another --out"
            raise CheckpointError(f"{self.folder}: none of {len(folders)} checkpoints is intact\n  remedy: {remedy}")
        return None

    def find_before(self, step: int) -> Checkpoint | None:
        """The newest checkpoint of an earlier step."""
        for folder in reversed(self._list_all()):
            if int(folder.name) < step:
                return _load_verified(folder)
        return None

    def _list_all(self) -> list[Path]:
        return sorted(folder for folder in self.folder.glob("[0-9]*") if folder.is_dir())

    def _describe_write_error(self, step: int, error: Exception) -> str:
        reason, remedy = (
            write_error_reason(error),
            write_error_remedy(self.folder, error, resume_hint(self.folder.parent)),
        )
        existing = self._list_all()
        kept = f"that of step {int(existing[-1].name)} is kept" if existing else "there is no earlier one"
        return f"{self.folder}: the checkpoint of step {step} cannot be written ({reason}); {kept}\n  remedy: {remedy}"


def _load_verified(folder: Path) -> Checkpoint:
    try:
        content = json.loads((folder / STATE_FILE).read_text(encoding="utf-8"))
        step, state, digests = int(content["step"]), content["state"], dict(content["files"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{folder / STATE_FILE} cannot be read ({type(error).__name__})") from error
    for name, digest in digests.items():
        file = folder / name
        if not file.is_file():
            raise CheckpointError(f"{file} is missing")
        if _digest(file) != digest:
            raise CheckpointError(f"{file} has changed since it was written")
    return Checkpoint(step, folder, state)


def _list_files(folder: Path) -> Iterator[Path]:
    return (file for file in sorted(folder.rglob("*")) if file.is_file())


def _digest(file: Path) -> str:
    with file.open("rb") as stream:
        return file_digest(stream, "sha256").hexdigest()
