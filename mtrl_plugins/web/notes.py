"""Notes and tags of a run, which are kept in its folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import Field, StringConstraints, ValidationError

from gateway.config.base import FrozenModel
from gateway.disk_errors import describe_write_error, write_atomically
from trainer.storage.rollout_file import RunError

FILE = "notes.json"
Tag = Annotated[str, StringConstraints(min_length=1, max_length=60)]


class Notes(FrozenModel):
    """What people say of a run."""

    notes: Annotated[str, StringConstraints(max_length=100_000)] = ""
    tags: Annotated[tuple[Tag, ...], Field(max_length=50)] = ()

    @classmethod
    def load(cls, run: Path) -> Self:
        """The notes of a run; empty if there are none, or if they cannot be read."""
        return cls.read(run) or cls()

    @classmethod
    def read(cls, run: Path) -> Self | None:
        """The notes of a run; None if there are none, or if they cannot be read."""
        try:
            return cls.model_validate_json((run / FILE).read_bytes())
        except (OSError, ValidationError):
            return None

    def save(self, run: Path) -> dict[str, Any]:
        """Saves and returns them. Raises RunError if they cannot be written, or replace what cannot be read."""
        if (run / FILE).exists() and type(self).read(run) is None:
            raise RunError(f"{run / FILE}: is not read as notes\n  remedy: mend or remove it, then save again")
        try:
            write_atomically(run / FILE, (self.model_dump_json(indent=2) + "\n").encode())
        except OSError as error:
            raise RunError(describe_write_error(run / FILE, error, "then save the notes again")) from error
        return self.model_dump(mode="json")
