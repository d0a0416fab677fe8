"""The rows and scores of an environment with a runner of its own, kept beside a run's tape and read in a replay.

Rollouts are on the tape itself, as calls of the training loop. Rows are read before the tape begins, and scores are
asked for once the sessions have ended.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gateway.disk_errors import describe_write_error
from gateway.errors import ConfigError
from gateway.line_file import iterate_lines, parse_json_line
from trainer.environments.host_child import HostChild
from trainer.environments.host_process import EnvironmentFailed, EnvironmentHost, get_host, replace_host
from trainer.environments.settings import EnvironmentSettings, RunnerSettings

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
        """Appends what is not written yet. Raises EnvironmentFailed if that is impossible."""
        if self._file is None:
            return
        try:
            with self._file.open("a", encoding="utf-8") as stream:
                stream.writelines(self._lines)
        except OSError as error:
            raise EnvironmentFailed(describe_write_error(self._file, error, "and record again")) from error
        self._lines.clear()


def record_host(settings: EnvironmentSettings | None) -> HostTape | None:
    """Records rows and scores of the environment from now on, if it is one with a runner of its own."""
    if not isinstance(settings, RunnerSettings):
        return None
    host = get_host(settings)
    host.tape = HostTape()
    return host.tape


class RecordedHost(EnvironmentHost):
    """Answers from a tape's folder, and starts no process."""

    def __init__(self, settings: EnvironmentSettings, folder: Path) -> None:
        super().__init__(settings)
        self._file = folder / HOST_TAPE
        self._rows: dict[tuple[Any, ...], list[Any]] = {}
        self._scores: dict[tuple[int, str], Any] = {}
        try:
            with self._file.open("rb") as stream:
                for line in iterate_lines(stream):
                    if line.is_complete:  # A run that was killed may leave a part of one.
                        self._read(parse_json_line(line.data))
        except (OSError, ValueError, LookupError, TypeError) as error:
            reason = error.strerror if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
            raise ConfigError(f"cannot be read: {reason}", file=self._file, remedy="record the run again") from error

    def _read(self, line: Mapping[str, Any]) -> None:
        if "page" in line:
            self._rows[tuple(line["page"])] = line["rows"]
        else:
            self._scores |= {(line["starts"], rollout): score for rollout, score in line["scores"].items()}

    def start(self) -> HostChild:
        """Refuses to start a process."""
        raise EnvironmentFailed(f"{self.name}: what was not recorded is asked for; record the run again")

    def rows(self, split: str, start: int, count: int) -> list[Any]:
        """The recorded rows."""
        if (page := self._rows.get((split, start, count))) is None:
            raise EnvironmentFailed(f"{self._file}: has no rows of {split!r} from {start} on; record the run again")
        return page

    def score(self, starts: int, rollouts: Sequence[str]) -> list[Any]:
        """The recorded scores; None for rollouts without one."""
        return [self._scores.get((starts, rollout)) for rollout in rollouts]


@contextmanager
def replay_host(settings: EnvironmentSettings | None, tape: Path) -> Iterator[None]:
    """Answers for the environment from the tape's folder, if it is one with a runner of its own."""
    if not isinstance(settings, RunnerSettings):
        yield
        return
    with replace_host(RecordedHost(settings, tape)):
        yield
