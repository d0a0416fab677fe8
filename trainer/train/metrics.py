"""What a step measured is in the file, whole, before the next begins; going on from a step forgets what followed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from trainer.run.file import RunError
from trainer.run.history import Measured, dump, lines


class Metrics:
    """Adds a line a step; see `run/history.py` for what a line is."""

    def __init__(self, file: Path) -> None:
        self.file = file
        with self._written():
            file.parent.mkdir(parents=True, exist_ok=True)
            self._file = file.open("ab", buffering=0)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def cut(self, step: int) -> list[Measured]:
        """What was measured up to this step, oldest first; whatever stands behind it is gone."""
        kept, whole = [], 0
        for measured, end in lines(self.file):
            if measured["step"] > step:
                break
            kept.append(measured)
            whole = end
        with self._written():
            self._file.truncate(whole)
        return kept

    def add(self, step: int, metrics: Mapping[str, float]) -> None:
        """Raises RunError, with nothing added, where the disk has no room."""
        rest = memoryview(dump(step, metrics))
        with self._written():
            start = self._file.seek(0, 2)
            try:
                while rest:
                    rest = rest[self._file.write(rest) :]
            except BaseException:  # Half a line would spoil the next one.
                with suppress(OSError):
                    self._file.truncate(start)
                raise

    @contextmanager
    def _written(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise RunError(
                f"{self.file}: cannot be written ({error.strerror})\n"
                "  remedy: make room on the disk, or mend what it says, and go on with --resume"
            ) from error
