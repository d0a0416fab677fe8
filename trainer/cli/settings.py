"""Settings come from a file and the command line: what is typed counts, and a mistake names its place."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from gateway.config.env import Expansion
from gateway.config.mistakes import mistakes
from gateway.config.models import Frozen
from gateway.config.read import read
from gateway.errors import ConfigError, ConfigErrors
from trainer.cli.told import READ

Settings = TypeVar("Settings", bound=Frozen)
JOBS = Path(__file__).parents[1] / "jobs"
"""Run files that come with the package, by name."""


def job(name: str | Path) -> Path:
    """A file, or one of the jobs that come with the package."""
    known = {file.stem: file for file in sorted(JOBS.glob("*.yaml"))}
    found = known.get(str(name), Path(name))
    if not found.exists():
        remedy = f"name a YAML file, or one of {', '.join(known)}"
        raise ConfigError("there is no such run file", file=found, field="--config", remedy=remedy)
    return found


def written(file: Path | None) -> dict[str, Any]:
    if file is None:
        return {}
    found = read(file) or {}
    if not isinstance(found, dict):
        raise ConfigError("is no mapping", file=file, remedy="write settings as `name: value`")
    return found


def validated(kind: type[Settings], file: Path | None, given: Mapping[str, Any]) -> Settings:
    """The file's settings, under those of the command line that are not None."""
    READ.set(file)
    values = {**written(file), **{name: value for name, value in given.items() if value is not None}}
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        where = file or Path("the options")
        found = mistakes(error, values, where, Expansion({}, where), kind)
        raise ConfigErrors([_placed(one, given) for one in found]) from error


def _placed(mistake: ConfigError, given: Mapping[str, Any]) -> ConfigError:
    """With the option that it was made in, where it was one."""
    if given.get(mistake.field) is None:
        return mistake
    return ConfigError(mistake.problem, field=f"--{mistake.field}", remedy=mistake.remedy)
