"""What a run is doing now, in progress.json of its folder: written every second, read by the web UI.

Training, an evaluation and `mtrl-train rollout` write it and remove it at their end. One that was killed leaves it,
and its age says so.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Event, Thread
from typing import Self

from pydantic import ConfigDict, TypeAdapter

from gateway.disk_errors import write_atomically

log = logging.getLogger(__name__)

STATUS_FILE = "progress.json"
WRITE_S = 1.0
"""The time between two writes."""
JOIN_TIMEOUT_S = 2.0
MAX_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class RunStatus:
    """A run at one moment. Times are in seconds, None where nothing is known yet."""

    __pydantic_config__ = ConfigDict(allow_inf_nan=False)
    step: int = 0
    steps: int = 0
    """Steps of the training; 0 for an evaluation, or rollouts without training."""
    phase: str = ""
    """Such as "rolling out", "learning" or "evaluating"; empty between two."""
    phase_s: float = 0.0
    left_s: float | None = None
    left_of: str = ""
    """What `left_s` is the remaining time of, such as "of the rollouts"."""
    run_left_s: float | None = None
    ended: int = 0
    total: int = 0
    """The expected number of rollouts; 0 if it is unknown."""
    pending: int = 0
    generating: int = 0
    calling: int = 0
    interacting: int = 0
    turns: int = 0
    written: int = 0
    """Tokens that the policy has written."""
    written_per_s: float = 0.0
    passes: int = 0
    """Micro-batches of the update that are done."""
    total_passes: int = 0
    slowest_tool: str = ""
    slowest_p95_s: float | None = None


READ = TypeAdapter(RunStatus)


def write_status(folder: Path, status: RunStatus) -> None:
    """Writes a run's status. It is not worth a wait for the disk."""
    write_atomically(folder / STATUS_FILE, json.dumps(asdict(status)).encode(), sync=False)


def read_status(folder: Path) -> tuple[RunStatus, float] | None:
    """The status and its age in seconds; None if the run does not train, or the file is damaged."""
    file = folder / STATUS_FILE
    try:
        with file.open("rb") as stream:
            status = READ.validate_json(stream.read(MAX_BYTES))
        return status, max(0.0, time.time() - file.stat().st_mtime)
    except (OSError, ValueError):
        return None


class StatusFile:
    """A context manager that writes a run's status from a thread of its own, and removes it at the end."""

    def __init__(self, folder: Path, read: Callable[[], RunStatus], every_s: float = WRITE_S) -> None:
        self._folder, self._read, self._every_s = folder, read, every_s
        self._ended = Event()
        self._thread = Thread(target=self._keep_writing, name="run status", daemon=True)

    def __enter__(self) -> Self:
        self._write()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join(JOIN_TIMEOUT_S)
        with suppress(OSError):
            (self._folder / STATUS_FILE).unlink()

    def _keep_writing(self) -> None:
        while not self._ended.wait(self._every_s):
            self._write()

    def _write(self) -> None:
        try:
            write_status(self._folder, self._read())
        except Exception as problem:  # boundary: a full disk must not end the run, which tells of it itself
            log.debug("the run's status cannot be written: %s", problem)
