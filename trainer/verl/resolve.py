"""`${...}` stands for another key or for the environment; what cannot be resolved is refused in its place."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gateway.config.read import value
from gateway.errors import ConfigError
from trainer.verl.written import Given, Keys

USE = re.compile(r"\$\{(?:(?P<how>oc\.env|oc\.select):)?\s*(?P<name>[\w.@/-]+)\s*(?:,\s*(?P<default>[^{}]*))?\}")
DEEP = 20
"""Keys that stand for each other end here."""


def resolved(keys: Keys, defaults: Mapping[str, Any]) -> Keys:
    return {key: Given(_One(key, given, keys, defaults).of(given.value), given.place) for key, given in keys.items()}


@dataclass(frozen=True, slots=True)
class _One:
    """A key whose value is resolved."""

    key: str
    given: Given
    keys: Keys
    defaults: Mapping[str, Any]

    def of(self, said: Any, deep: int = 0) -> Any:
        if isinstance(said, list):
            return [self.of(one, deep) for one in said]
        if not isinstance(said, str) or "${" not in said:
            return said
        if whole := USE.fullmatch(said):
            return self._meant(whole, deep)
        text = USE.sub(lambda found: str(self._meant(found, deep)), said)
        if "${" in text:
            raise self._wrong(f"{said!r} cannot be resolved here")
        return text

    def _meant(self, found: re.Match[str], deep: int) -> Any:
        if deep > DEEP:
            raise self._wrong(f"{found[0]} stands for itself in the end")
        name, default = self._absolute(found["name"]), found["default"]
        if found["how"] == "oc.env":
            said = os.environ.get(name, default)
        elif name in self.keys:
            return replace(self, key=name, given=self.keys[name]).of(self.keys[name].value, deep + 1)
        elif name in self.defaults:
            return self.defaults[name]
        else:
            said = default
        if said is None and found["how"] == "oc.select":
            return None
        if said is None:
            raise self._wrong(f"{found[0]} stands for nothing that is known here")
        return value(said, Path(self.given.place))

    def _absolute(self, name: str) -> str:
        """Dots in front lead upwards from the key."""
        bare = name.lstrip(".")
        above = self.key.split(".")[: len(bare) - len(name)] if bare != name else []
        return ".".join((*above, bare))

    def _wrong(self, problem: str) -> ConfigError:
        return ConfigError(problem, file=self.given.place, field=self.key, remedy="write the value")
