"""Replays an environment with a runner of its own from a tape's folder: its rows and scores, as they were recorded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gateway.errors import ConfigError
from gateway.line_file import iterate_lines, parse_json_line
from mtrl_plugins.environments.host_child import HostChild
from mtrl_plugins.environments.host_process import EnvironmentFailed, EnvironmentHost, get_host, replace_host
from mtrl_plugins.environments.host_tape import HOST_TAPE, HostTape
from mtrl_plugins.environments.settings import EnvironmentSettings, RunnerSettings


def record_host(settings: EnvironmentSettings | None, *, record: bool) -> HostTape | None:
    """Records rows and scores of the environment from now on, if it is one with a runner of its own, or no longer."""
    if not isinstance(settings, RunnerSettings):
        return None
    host = get_host(settings)
    host.tape = HostTape() if record else None
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
