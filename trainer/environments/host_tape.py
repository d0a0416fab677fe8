"""Records the rows and scores of an environment with a runner of its own in the folder of a run's tape.

Rollouts are on the tape itself, as calls of the training loop. Rows are read before the tape begins, and scores are
asked for once the sessions have ended.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gateway.disk_errors import describe_write_error
from gateway.errors import GatewayError

HOST_TAPE = "environment.jsonl"
"""The file in the tape's folder."""


class HostTape:
    """Records a host's answers: in memory until there is a folder, then in its file."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._file: Path | None = None
        self._lock = threading.Lock()

    def add_rows(self, page: tuple[str, int, int], rows: Sequence[Any]) -> None:
        """Records rows: a page is its split, its start and its length."""
        self._add({"page": page, "rows": rows})

    def add_scores(self, starts: int, rollouts: Sequence[str], scores: Sequence[Any]) -> None:
        """Records the scores of rollouts, whose names are those of one start of the process."""
        self._add({"starts": starts, "scores": dict(zip(rollouts, scores, strict=True))})

    def start(self, folder: Path) -> None:
        """Writes to the tape's folder from now on."""
        with self._lock:
            self._file = folder / HOST_TAPE
            self._write()

    def _add(self, line: Mapping[str, Any]) -> None:
        with self._lock:
            self._lines.append(json.dumps(line) + "\n")
            self._write()

    def _write(self) -> None:
        """Appends what is not written yet. Raises GatewayError if that is impossible."""
        if self._file is None:
            return
        try:
            with self._file.open("a", encoding="utf-8") as stream:
                stream.writelines(self._lines)
        except OSError as error:
            raise GatewayError(describe_write_error(self._file, error, "and record again")) from error
        self._lines.clear()
