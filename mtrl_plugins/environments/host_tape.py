"""Records the rows and scores of an environment with a runner of its own in the folder of a run's tape.

Rollouts are on the tape itself, as calls of the training loop. Rows are read before the tape begins, and scores are
asked for once the sessions have ended.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Mapping, Sequence
from errno import ENOSPC
from os import strerror
from pathlib import Path
from typing import Any

from gateway.disk_errors import describe_write_error
from gateway.errors import GatewayError

log = logging.getLogger(__name__)

HOST_TAPE = "environment.jsonl"
"""The file in the tape's folder."""


class HostTape:
    """Records a host's answers: in memory until there is a folder, then in its file."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._file: Path | None = None
        self._has_failed = False
        self._lock = threading.Lock()

    def add_rows(self, page: tuple[str, int, int], rows: Sequence[Any]) -> None:
        """Records rows: a page is its split, its start and its length."""
        self._add({"page": page, "rows": rows})

    def add_scores(self, starts: int, rollouts: Sequence[str], scores: Sequence[Any]) -> None:
        """Records the scores of rollouts, whose names are those of one start of the process."""
        self._add({"starts": starts, "scores": dict(zip(rollouts, scores, strict=True))})

    def start(self, folder: Path) -> None:
        """Writes to the tape's folder from now on. Raises GatewayError if that is impossible."""
        with self._lock:
            self._file = folder / HOST_TAPE
            if problem := self._write():
                raise GatewayError(problem)

    def _add(self, line: Mapping[str, Any]) -> None:
        """A failed write is logged: the tape itself is on the same disk, and the run ends with it."""
        with self._lock:
            if self._has_failed:
                return
            self._lines.append(json.dumps(line) + "\n")
            if problem := self._write():
                log.error("%s", problem)

    def _write(self) -> str:
        """Appends what is not written yet, or says why that is impossible. Then the recording stops: whole lines, or
        none."""
        if self._file is None:
            return ""
        try:
            with self._file.open("ab", buffering=0) as stream:
                whole, text = stream.tell(), "".join(self._lines).encode()
                if stream.write(text) < len(text):
                    stream.truncate(whole)
                    raise OSError(ENOSPC, strerror(ENOSPC), str(self._file))
        except OSError as error:
            self._has_failed = True
            return describe_write_error(self._file, error, "and record again")
        self._lines.clear()
        return ""
