"""Loads ms-swift's plug-in files, and finds and instantiates what they register."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from gateway.config.diagnostics import closest_match
from gateway.errors import ConfigError, describe_exception
from trainer.load_plugin import load_plugin

DEFAULT_ARGUMENTS: Mapping[str, Any] = {
    "soft_max_length": None,
    "soft_cache_length": None,
    "repetition_n_grams": 3,
    "repetition_max_penalty": -1.0,
    "reward_model_plugin": None,
    "seed": 42,
}
"""Arguments of a run that reward functions read, with ms-swift's defaults."""


def load_plugin_files(plugins: str | Sequence[str], field: str) -> list[Path]:
    """Runs the plug-in files, each once."""
    files = [plugins] if isinstance(plugins, str) else list(plugins)
    for file in files:
        load_plugin(f"{file}:__name__", field)
    return [Path(file) for file in files]


def find_registered(registry: Mapping[str, Any], name: str, files: Sequence[Path], field: str, what: str) -> Any:
    """The object registered under a name; raises ConfigError with similar names."""
    if name in registry:
        return registry[name]
    near = closest_match(name, registry)
    hint = f"did you mean {near!r}?" if near else f"registered are {', '.join(registry) or 'none'}"
    place = ", ".join(map(str, files)) or None
    raise ConfigError(f"does not register a {what} {name!r}", file=place, field=field, remedy=f"register it; {hint}")


def instantiate(plugin: Any, field: str, **arguments: Any) -> Any:
    """An instance of a class, with those arguments that its `__init__` accepts; other objects are returned as is."""
    if not isinstance(plugin, type):
        return plugin
    try:
        return plugin(**_accepted_arguments(plugin, arguments))
    except ConfigError:
        raise
    except Exception as error:  # boundary: a user's own `__init__` may raise anything
        place = inspect.getsourcefile(plugin) if plugin.__module__ != "builtins" else None
        problem = f"{plugin.__name__} cannot be instantiated: {describe_exception(error)}"
        raise ConfigError(problem, file=place, field=field, remedy="see its `__init__`") from error


def build_arguments(options: Mapping[str, Any]) -> SimpleNamespace:
    """The run's arguments for reward functions."""
    return SimpleNamespace(**{**DEFAULT_ARGUMENTS, **options})


def _accepted_arguments(plugin: type, arguments: Mapping[str, Any]) -> dict[str, Any]:
    parameters = inspect.signature(plugin).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return dict(arguments)
    names = {parameter.name for parameter in parameters}
    return {name: value for name, value in arguments.items() if name in names}
