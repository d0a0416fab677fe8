"""Checkpoints of a run: written whole, found again, the best one kept, and what the disk must have free."""

from __future__ import annotations

import errno
import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

from gateway.disk_errors import require_same_folder, sync_path, write_atomically, write_error_reason, write_error_remedy
from gateway.errors import OperatorError
from trainer.policy.memory_parts import GIB, count_adapter_parameters, load_meta_model
from trainer.policy.settings import PolicyError, UpdateSettings
from trainer.policy.shards import digest_file
from trainer.storage.rollout_file import resume_hint
from trainer.train.settings import TrainSettings
from trainer.weight_files import share_weight_files
from trainer.worker_thread import run_in_background

BEST_FILE = "best.json"
METRIC = "eval/greedy"
TASKS_METRIC, LOST_METRIC = "eval/tasks", "eval/lost"
MIN_SCORED = 0.9
"""The share of an evaluation's tasks that must be scored: the few that an outage leaves may be the easy ones."""


def measured_value(metrics: Mapping[str, float]) -> float | None:
    """An evaluation's success, if nearly all of its tasks were scored, so that it may be compared with others."""
    scored, lost = metrics.get(TASKS_METRIC, 0.0), metrics.get(LOST_METRIC, 0.0)
    return metrics.get(METRIC) if scored and scored >= MIN_SCORED * (scored + lost) else None


class BestCheckpoint:
    """The step with the highest `eval/greedy` so far, and its value. Step 0 is the model before training."""

    def __init__(self, run: Path, step: int = 0) -> None:
        """`step` is the one that the run goes on from: what came after it is measured again."""
        self.file, self.step, self.value = run / BEST_FILE, 0, -1.0
        try:
            saved = json.loads(self.file.read_text(encoding="utf-8"))
            best_step, value = int(saved["step"]), float(saved[METRIC])
        except (OSError, ValueError, KeyError, TypeError):
            return
        if 0 < best_step <= step or (step and not best_step):
            self.step, self.value = best_step, value

    def is_improved_by(self, value: float | None) -> bool:
        """Whether an evaluation is better than all before."""
        return value is not None and value > self.value

    def record(self, step: int, value: float) -> None:
        """Makes this step the best; its checkpoint is on the disk."""
        self.step, self.value = step, value
        write_atomically(self.file, (json.dumps({"step": step, METRIC: value}) + "\n").encode())


FLOAT_BYTES = 4


def forecast_checkpoints(settings: TrainSettings, model: Path, parameters: int, folder: Path) -> tuple[str, str] | None:
    """A problem and its remedy if a run's checkpoints will not fit on the disk."""
    size = estimate_checkpoint(settings.update, model, parameters)
    kept = settings.checkpoint.keep + bool(settings.evaluation.every)
    needed, free = (kept + 1) * size, _free_bytes(folder)
    if needed <= free:
        return None
    best = ", the best one" if settings.evaluation.every else ""
    problem = (
        f"checkpoints will take up to {needed / GIB:.1f} GiB: {size / GIB:.1f} GiB for each of the latest"
        f" {settings.checkpoint.keep}{best} and the one that is being written;"
        f" {free / GIB:.1f} GiB are free at {folder}"
    )
    lower = "lower `checkpoint.keep`, " if settings.checkpoint.keep > 2 else ""
    return problem, f"{lower}free some space, or name a folder on another disk with --out"


def estimate_checkpoint(update: UpdateSettings, model: Path, parameters: int) -> int:
    """Bytes of weights and two optimizer moments in float32; with LoRA only those of the adapters."""
    trained = count_adapter_parameters(load_meta_model(model), update) if update.lora else parameters
    critic = parameters if update.critic else 0
    return 3 * FLOAT_BYTES * (trained + critic)


def _free_bytes(folder: Path) -> int:
    """Free bytes where the folder is, or will be."""
    existing = next(parent for parent in (folder.absolute(), *folder.absolute().parents) if parent.exists())
    return shutil.disk_usage(existing).free


CHECKPOINTS_FOLDER = "checkpoints"
STATE_FILE = "state.json"
UNFINISHED = ".writing"
"""How the names of folders begin that are being written."""


class CheckpointError(OperatorError):
    """A checkpoint that cannot be written or read. The message says what, where, and how to fix it."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A verified checkpoint of the state after a step."""

    step: int
    folder: Path
    state: Mapping[str, Any]


Finish = Callable[[], Mapping[str, str]]
"""Waits for files that are still being written; returns their digests by their paths in the checkpoint."""


class Checkpoints:
    """The checkpoints of a run; the latest `keep` are kept."""

    def __init__(self, run: Path, keep: int = 2) -> None:
        self.folder, self.keep = run / CHECKPOINTS_FOLDER, keep
        self.best_step: int | None = None
        """The step of a checkpoint that is kept as well."""
        self._temporary = self.folder / UNFINISHED
        self._pending: Future[None] | None = None

    def save(self, step: int, state: Mapping[str, Any], write: Callable[[Path], Finish | None]) -> None:
        """Saves a checkpoint, whose files `write` puts into a folder. Older ones are deleted once it is on the disk.

        If `write` returns a function, the rest happens in the background: `wait` and the next `save` wait for it.
        """
        self.wait()
        self._temporary = self.folder / unfinished_name(step)
        with self._undoing(step):
            self.remove_unfinished()
            self.folder.mkdir(exist_ok=True)  # Its parent is the run, which is not made anew if it was removed.
            with require_same_folder(self.folder):
                self._temporary.mkdir()
                finish = write(self._temporary)
            if finish is None:
                self._commit(step, state, {})
        if finish is not None:
            self._pending = run_in_background("checkpoint", partial(self._finish, step, state, finish))

    def wait(self) -> None:
        """Waits for a checkpoint that is being written; raises the error if it failed."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def raise_failure(self) -> None:
        """Raises the error of a checkpoint that failed in the background."""
        if self._pending is not None and self._pending.done():
            self.wait()

    def remove_unfinished(self) -> None:
        """Removes what a process left that ended while it wrote."""
        for folder in self.folder.glob(f"{UNFINISHED}*"):
            shutil.rmtree(folder, ignore_errors=True)

    def _finish(self, step: int, state: Mapping[str, Any], finish: Finish) -> None:
        with self._undoing(step):
            with require_same_folder(self.folder):
                digests = finish()
            self._commit(step, state, digests)

    def _commit(self, step: int, state: Mapping[str, Any], digests: Mapping[str, str]) -> None:
        """Makes what was written the checkpoint of the step; `digests` are those that need not be computed."""
        temporary, final = self._temporary, self.folder / f"{step:06}"
        share_weight_files(temporary)
        replaced = self._replaced(step)
        names = [file.relative_to(temporary).as_posix() for file in sorted(temporary.rglob("*")) if file.is_file()]
        if lacking := sorted(digests.keys() - {*names}):
            raise FileNotFoundError(errno.ENOENT, f"{lacking[0]} was written, and is not there")
        files = {name: digests.get(name) or digest_file(temporary / name) for name in names}
        content = {"step": step, "state": state, "files": files}
        (temporary / STATE_FILE).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        for path in [*temporary.rglob("*"), temporary]:  # Folders too, which hold the names.
            sync_path(path)
        shutil.rmtree(replaced, ignore_errors=True)
        if final.exists():  # Left by a run that went back to an earlier step.
            final.rename(replaced)
        temporary.rename(final)
        sync_path(self.folder)
        shutil.rmtree(replaced, ignore_errors=True)
        for old in self._list_all()[: -self.keep]:
            if int(old.name) != self.best_step:
                shutil.rmtree(old, ignore_errors=True)

    def _replaced(self, step: int) -> Path:
        return self.folder / f".replaced-{step:06}"

    @contextmanager
    def _undoing(self, step: int) -> Iterator[None]:
        """Leaves nothing behind where writing fails, and says why."""
        try:
            yield
        except Exception as error:  # boundary: each file format reports a full disk in its own way
            message = self._describe_write_error(step, error)  # Before the disk has room again.
            shutil.rmtree(self._temporary, ignore_errors=True)
            replaced, final = self._replaced(step), self.folder / f"{step:06}"
            if replaced.is_dir() and not final.exists():
                replaced.rename(final)
            for folder in (self.folder, self.folder.parent):  # If the run was removed, `write` may have made them.
                with suppress(OSError):
                    folder.rmdir()
            if isinstance(error, PolicyError):  # Such as a lost rank, which has nothing to do with the disk.
                raise
            raise CheckpointError(message) from error

    def find_latest(self, warn: Callable[[str], None] = lambda _: None) -> Checkpoint | None:
        """The newest intact checkpoint; warns about newer ones that are not. None if there are no checkpoints."""
        folders = self._list_all()
        for folder in reversed(folders):
            try:
                return load_checkpoint(folder)
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
                return load_checkpoint(folder)
        return None

    def _list_all(self) -> list[Path]:
        return sorted(folder for folder in self.folder.glob("[0-9]*") if folder.is_dir())

    def _describe_write_error(self, step: int, error: Exception) -> str:
        reason = write_error_reason(error)
        remedy = write_error_remedy(self.folder, error, resume_hint(self.folder.parent))
        existing = self._list_all()
        kept = f"that of step {int(existing[-1].name)} is kept" if existing else "there is no earlier one"
        return f"{self.folder}: the checkpoint of step {step} cannot be written ({reason}); {kept}\n  remedy: {remedy}"


def unfinished_name(step: int) -> str:
    """A name for the folder of a checkpoint that is being written, which no folder had before.

    Machines that share a disk by NFS may for a minute still take an earlier name for what has been renamed since: a
    whole checkpoint, which they would write into.
    """
    return f"{UNFINISHED}-{step:06}-{uuid4().hex[:8]}"


def load_checkpoint(folder: Path) -> Checkpoint:
    """Reads a checkpoint, and verifies every file."""
    try:
        content = json.loads((folder / STATE_FILE).read_text(encoding="utf-8"))
        step, state, digests = int(content["step"]), content["state"], dict(content["files"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{folder / STATE_FILE} cannot be read ({type(error).__name__})") from error
    for name, digest in digests.items():
        file = folder / name
        if not file.is_file():
            raise CheckpointError(f"{file} is missing")
        if digest_file(file) != digest:
            raise CheckpointError(f"{file} has changed since it was written")
    return Checkpoint(step, folder, state)
