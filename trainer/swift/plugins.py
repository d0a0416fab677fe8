"""Plug-in files are run for what they register; a name that nobody registers is told with the files."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from gateway.config.mistakes import nearest
from gateway.errors import ConfigError, told
from trainer.plug import plug_in
from trainer.swift.importing import standing_in

ARGS: Mapping[str, Any] = {
    "soft_max_length": None,
    "soft_cache_length": None,
    "repetition_n_grams": 3,
    "repetition_max_penalty": -1.0,
    "reward_model_plugin": None,
    "seed": 42,
}
"""What is looked for among a run's arguments, as ms-swift has it where nobody says so."""


def ran(plugins: str | Sequence[str], field: str) -> list[Path]:
    """Each file once, however often it is named."""
    files = [plugins] if isinstance(plugins, str) else list(plugins)
    for file in files:
        plugged_in(f"{file}:__name__", field)
    return [Path(file) for file in files]


def plugged_in(name: str, field: str) -> Any:
    """As `plug_in` has it; what is loaded may import ms-swift's names."""
    path, _, _ = name.rpartition(":")
    file = Path(path)
    with standing_in(file.stem if file.suffix == ".py" else path, [file.resolve().parent, Path.cwd()]):
        return plug_in(name, field)


def registered(registry: Mapping[str, Any], name: str, files: Sequence[Path], field: str, what: str) -> Any:
    if name in registry:
        return registry[name]
    near = nearest(name, registry)
    known = f"did you mean {near!r}?" if near else f"there are {', '.join(registry) or 'none'}"
    place = ", ".join(map(str, files)) or None
    raise ConfigError(f"registers no {what} {name!r}", file=place, field=field, remedy=f"register it; {known}")


def made(found: Any, field: str, **given: Any) -> Any:
    """An object of a class, given what its `__init__` takes; anything else is made already."""
    if not isinstance(found, type):
        return found
    try:
        return found(**_taken(found, given))
    except ConfigError:
        raise
    except Exception as error:  # boundary: a user's own `__init__` may raise anything
        place = inspect.getsourcefile(found) if found.__module__ != "builtins" else None
        problem = f"{found.__name__} cannot be made: {told(error)}"
        raise ConfigError(problem, file=place, field=field, remedy="see its `__init__`") from error


def arguments(options: Mapping[str, Any]) -> SimpleNamespace:
    return SimpleNamespace(**{**ARGS, **options})


def _taken(found: type, given: Mapping[str, Any]) -> dict[str, Any]:
    parameters = inspect.signature(found).parameters.values()
    if any(one.kind is one.VAR_KEYWORD for one in parameters):
        return dict(given)
    names = {one.name for one in parameters}
    return {name: value for name, value in given.items() if name in names}
