"""The folder of a training run, written by one process: settings, metrics, rollouts, tapes and checkpoints.

runs/NAME/run.json         the resolved settings, versions, git commit, and a hash of the data
runs/NAME/metrics.jsonl    a line for each step
runs/NAME/rollouts.jsonl   every rollout, see `storage/rollout_line.py`
runs/NAME/tapes/000000     what the tools answered from this step on, if it was recorded
runs/NAME/checkpoints/     see `checkpoint.py`
runs/NAME/tensorboard/     for TensorBoard
"""

from __future__ import annotations

import fcntl
import json
import os
import platform
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from hashlib import blake2b
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from gateway.errors import ConfigError
from gateway.process.spawn import run_command
from trainer.data.tasks import example_names, iterate_texts
from trainer.distributed.fingerprint import find_versions
from trainer.rollout.settings import flatten_settings
from trainer.rollout.task import Task
from trainer.storage import run_files
from trainer.storage.rollout_file import ROLLOUTS_FILE, resume_hint
from trainer.storage.run_files import LOGS_FOLDER, RUN_INFO_FILE, RUN_NAMES, read_run_info, write_json
from trainer.storage.token_credit import CREDITS_FILE, truncate_credits
from trainer.train.checkpoint import Checkpoints
from trainer.train.settings import TrainSettings

if TYPE_CHECKING:
    from trainer.train.job import Job


DIGEST_BYTES = 16
Fingerprint = Mapping[str, str]
"""The hash of each source, by its name."""


def fingerprint_tasks(job: Job) -> Fingerprint:
    """The hash of each source of rows; what is generated, or given as Python objects, has none."""
    settings = job.settings
    if settings.sft is None and any(part.brings_rows for part in settings.parts):
        return {}
    stages = dict.fromkeys(stage.data for stage in settings.curriculum.stages)
    named = {name or settings.data: job.tasks.train[name] for name in stages}
    is_made = {*example_names(), *settings.objects}
    return {name: _hash_tasks(tasks) for name, tasks in named.items() if name not in is_made}


def _hash_tasks(tasks: Sequence[Task]) -> str:
    total = blake2b(digest_size=DIGEST_BYTES)
    for task in iterate_texts(tasks):
        content = json.dumps(_to_plain([task.id, task.messages, task.truth, task.columns]))
        total.update(content.encode("utf-8", "surrogatepass") + b"\n")
    return total.hexdigest()


def _to_plain(value: Any) -> Any:
    """The value as JSON that is the same in every process."""
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, Mapping):
        return sorted(([str(key), _to_plain(item)] for key, item in value.items()), key=lambda pair: pair[0])
    if isinstance(value, list | tuple):
        return [_to_plain(item) for item in value]
    if isinstance(value, bytes | bytearray):
        return blake2b(value, digest_size=DIGEST_BYTES).hexdigest()
    text = repr(value)
    # A text with an address would differ in every process.
    return type(value).__qualname__ if " at 0x" in text or isinstance(value, Iterator | set | frozenset) else text


TAPES = "tapes"
RUNS = Path("runs")
NAME_BYTES = 200
"""Of a name that a run's folder gets from its model or data."""
LOCK = ".lock"
CHANGEABLE_SETTINGS = frozenset(
    {
        "out",
        "steps",
        "evaluation",
        "early_stop",
        "checkpoint",
        "report",
        "engine",
        "engine_dtype",
        "serving",
        "rollout",
        "distributed",
        "concurrency",
        "update.micro_batch_tokens",
        "update.gradient_checkpointing",
        "update.compile",
        "update.logits_chunk",
    }
)
"""Settings that may differ when a run is resumed, since they do not affect what a step trains: where it runs, and what
it costs."""
GIT_S = 5.0


def next_free_folder(name: str) -> Path:
    """The next folder in `runs/` that does not exist yet."""
    number, name = 1, os.fsdecode(os.fsencode(name)[:NAME_BYTES])
    while (folder := RUNS / (name if number == 1 else f"{name}-{number}")).exists():
        number += 1
    return folder


def newest_run() -> Path:
    """The run in `runs/` that was started or resumed last, by the numbers of starts: clocks may be set back."""
    runs = [run_info.parent for run_info in RUNS.glob(f"*/{RUN_INFO_FILE}")]
    if not runs:
        raise ConfigError("there is no run to resume", file=RUNS, remedy="name its folder with --out")
    return max(runs, key=lambda run: (_start_number(run), len(run.name), run.name))


def _start_number(run: Path) -> int:
    """The number of a run's last start among the runs of its folder; 0 for one that cannot be read."""
    number = read_run_info(run).get("start")
    return number if isinstance(number, int) else 0


def choose_run_folder(settings: TrainSettings, name: str, *, resume: bool) -> Path:
    """The run's folder: `out`, else the newest run to resume, or the next free folder."""
    if settings.out is not None:
        return settings.out
    return newest_run() if resume else next_free_folder(name)


def require_folder(path: Path) -> None:
    """Raises ConfigError if a file is where the run's folder, or a folder above it, should be."""
    existing = next((place for place in (path, *path.parents) if os.path.lexists(place)), None)
    if existing is not None and not existing.is_dir():
        remedy = "name a folder that does not exist yet with --out"
        raise ConfigError("is a file, not a folder", file=existing, field="out", remedy=remedy)


def require_own_folder(path: Path) -> None:
    """Raises ConfigError if there is no run in a folder, but files of others that a run would write over.

    The logs of launchers may be there before the run.
    """
    require_folder(path)
    if is_run_folder(path):
        return
    if foreign := list_run_files(path):
        problem = f"has no run, but {', '.join(foreign)}, which a run would write over"
        raise ConfigError(problem, file=path, field="out", remedy="name a new folder with --out")


def require_writable(path: Path) -> None:
    """Raises ConfigError if the run's folder cannot be made, or nothing be written in it; leaves nothing there."""
    existing = next(place for place in (path, *path.absolute().parents) if place.exists())
    try:
        with TemporaryDirectory(dir=existing):
            pass
    except OSError as error:
        problem, remedy = f"cannot be written in ({error.strerror})", "name another folder with --out"
        raise ConfigError(problem, file=existing, field="out", remedy=remedy) from error


def is_run_folder(path: Path) -> bool:
    """Whether a run was started in a folder; a start that was killed leaves its lock."""
    return (path / RUN_INFO_FILE).exists() or (path / LOCK).exists()


def list_run_files(path: Path) -> list[str]:
    """What is in a folder under the names of a run's files, except logs and what a process holds."""
    names = RUN_NAMES - {LOGS_FOLDER, LOCK}
    return sorted(file.name for file in path.iterdir() if file.name in names) if path.is_dir() else []


class RunFolder:
    """A run's folder. The process that writes enters it; any process may read."""

    def __init__(self, path: Path, keep: int = 2) -> None:
        self.path = path
        self.checkpoints = Checkpoints(path, keep)
        self._lock = -1

    def __enter__(self) -> Self:
        require_own_folder(self.path)
        self.path.mkdir(parents=True, exist_ok=True)
        self._lock = os.open(self.path / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(self._lock)
            remedy = "wait until it ends, or name another folder with --out"
            raise ConfigError("another process is training in this folder", file=self.path, remedy=remedy) from error
        self.checkpoints.remove_unfinished()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self.has_run:
            self._remove_traces()
        os.close(self._lock)

    def _remove_traces(self) -> None:
        """Removes what was created for a run that never started; other files in the folder stay."""
        shutil.rmtree(self.path / TAPES, ignore_errors=True)
        if not list_run_files(self.path):  # The lock says that those are a run's.
            (self.path / LOCK).unlink(missing_ok=True)
        with suppress(OSError):
            self.path.rmdir()

    @property
    def has_run(self) -> bool:
        """Whether a run was started in this folder."""
        return (self.path / RUN_INFO_FILE).exists()

    def write_run_info(
        self,
        settings: TrainSettings,
        model: Path,
        engine: str,
        step: int,
        data: Fingerprint,
    ) -> None:
        """Writes run.json atomically, before the first step.

        Steps after `step` train on `data`.
        """
        fingerprints = {str(first): value for first, value in _read_data(self.path).items() if first <= step}
        siblings = [file.parent for file in self.path.absolute().parent.glob(f"*/{RUN_INFO_FILE}")]
        run_info = {
            "start": 1 + max(map(_start_number, siblings), default=0),
            "versions": find_versions() | {"mcp": version("mcp")},
            "machine": {"system": platform.system(), "processor": platform.machine(), "cores": os.cpu_count()},
            "git": _describe_commit(Path.cwd()),
            "engine": engine,
            "data": fingerprints | {str(step + 1): data},
            "model": str(model),
            "settings": settings.model_dump(mode="json"),
        }
        write_json(self.path / RUN_INFO_FILE, run_info, resume_hint(self.path))

    def load_settings(self) -> TrainSettings:
        """The settings that the run was made with."""
        return load_run_settings(self.path)

    def truncate(self, rollout_bytes: int, step: int) -> int:
        """Removes the rollouts and token credits of steps after this one, which are repeated.

        Returns how many bytes of the rollouts before it are missing.
        """
        truncate_credits(self.path / CREDITS_FILE, step)
        file = self.path / ROLLOUTS_FILE
        size = self.rollout_bytes
        if size > rollout_bytes:
            os.truncate(file, rollout_bytes)
        return max(0, rollout_bytes - size)

    @property
    def rollout_bytes(self) -> int:
        """The size of rollouts.jsonl."""
        file = self.path / ROLLOUTS_FILE
        return file.stat().st_size if file.exists() else 0

    def new_tape(self, step: int) -> Path:
        """A new tape for the steps from this one on; removes what was recorded of them before."""
        for tape in (self.path / TAPES).glob("[0-9]*"):
            if int(tape.name) >= step:
                shutil.rmtree(tape, ignore_errors=True)
        return self.path / TAPES / f"{step:06}"

    def find_tape(self, step: int) -> Path | None:
        """The tape that a step was recorded on."""
        tapes = sorted(tape for tape in (self.path / TAPES).glob("[0-9]*") if int(tape.name) <= step)
        return tapes[-1] if tapes else None


def load_run_settings(run: Path) -> TrainSettings:
    """The settings that a training was made with."""
    return run_files.load_run_settings(run, TrainSettings, "mtrl-train")


def _read_data(run: Path) -> dict[int, Fingerprint]:
    """The hashes of a run's data, by the first steps that trained on it; empty for runs without."""
    return {int(first): value for first, value in read_run_info(run).get("data", {}).items()}


def find_changed_data(run: Path, step: int, data: Fingerprint) -> list[str]:
    """The sources of tasks whose rows differ from those that a run trained on until `step`."""
    before: dict[str, str] = {}
    for first, value in _read_data(run).items():
        before |= value if first <= step else {}
    return [name for name, digest in data.items() if before.get(name, digest) != digest]


def use_start_model(run: Path, settings: TrainSettings) -> TrainSettings:
    """A run's settings with the model that it started from: a demo's could be another one in a newer version."""
    model = Path(str(read_run_info(run).get("model", "")))
    return settings.model_copy(update={"model": str(model)}) if (model / "config.json").is_file() else settings


def changed_settings(before: TrainSettings, after: TrainSettings) -> list[str]:
    """Changes of settings that must not change when a run is resumed."""
    old, new = flatten_settings(before.model_dump(mode="json")), flatten_settings(after.model_dump(mode="json"))
    return [
        f"{name} was {old.get(name)!r}, and is now {new.get(name)!r}"
        for name in sorted(old.keys() | new.keys())
        if old.get(name) != new.get(name) and not {name, name.split(".")[0]} & CHANGEABLE_SETTINGS
    ]


def _describe_commit(folder: Path) -> Mapping[str, Any] | None:
    """The commit of the repository that a folder is in, and whether files of it differ."""
    try:
        commit = _run_git(folder, "rev-parse", "HEAD")
        return {"commit": commit, "has_changes": bool(_run_git(folder, "status", "--porcelain", "-uno"))}
    except OSError:
        return None


def _run_git(folder: Path, *words: str) -> str:
    done = run_command(["git", "-C", str(folder), *words], GIT_S, env=os.environ | {"GIT_OPTIONAL_LOCKS": "0"})
    if done.status:
        raise OSError(done.error_text)
    return done.text.strip()
