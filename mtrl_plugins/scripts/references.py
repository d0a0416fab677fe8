"""Resolves `${...}` references to other keys and to the environment, as OmegaConf does; what cannot be is an error."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gateway.config.reader import parse_value
from gateway.errors import ConfigError
from mtrl_plugins.scripts.key_table import Keys, PlacedValue

REFERENCE = re.compile(
    r"\$\{(?:(?P<resolver>oc\.env|oc\.select):)?\s*(?P<name>[\w.@/-]+)\s*(?:,\s*(?P<default>[^{}]*))?\}"
)
MAX_DEPTH = 20
"""Deeper references are taken for a cycle."""


def resolve_references(keys: Keys, defaults: Mapping[str, Any]) -> Keys:
    """The keys with all `${...}` in their values resolved."""
    return {
        key: PlacedValue(_Resolver(key, placed, keys, defaults).resolve(placed.value), placed.place)
        for key, placed in keys.items()
    }


@dataclass(frozen=True, slots=True)
class _Resolver:
    """Resolves the references in the value of one key."""

    key: str
    placed: PlacedValue
    keys: Keys
    defaults: Mapping[str, Any]

    def resolve(self, value: Any, depth: int = 0) -> Any:
        if isinstance(value, list):
            return [self.resolve(item, depth) for item in value]
        if not isinstance(value, str) or "${" not in value:
            return value
        if match := REFERENCE.fullmatch(value):
            return self._resolve_match(match, depth)
        text = REFERENCE.sub(lambda match: str(self._resolve_match(match, depth)), value)
        if "${" in text:
            raise self._error(f"{value!r} cannot be resolved")
        return text

    def _resolve_match(self, match: re.Match[str], depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise self._error(f"{match[0]} refers to itself")
        name, default = self._absolute_name(match["name"]), match["default"]
        if match["resolver"] == "oc.env":
            text = os.environ.get(name, default)
        elif name in self.keys:
            placed = self.keys[name]
            return replace(self, key=name, placed=placed).resolve(placed.value, depth + 1)
        elif name in self.defaults:
            return self.defaults[name]
        else:
            text = default
        if text is None and match["resolver"] == "oc.select":
            return None
        if text is None:
            raise self._error(f"{match[0]} refers to an unknown key or variable")
        return parse_value(text, Path(self.placed.place))

    def _absolute_name(self, name: str) -> str:
        """Leading dots are relative to the key, as in OmegaConf."""
        bare = name.lstrip(".")
        above = self.key.split(".")[: len(bare) - len(name)] if bare != name else []
        return ".".join((*above, bare))

    def _error(self, problem: str) -> ConfigError:
        return ConfigError(problem, file=self.placed.place, field=self.key, remedy="write the value")
