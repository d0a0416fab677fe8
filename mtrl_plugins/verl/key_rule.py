"""Rules that translate another trainer's keys: names of a key, the setting that it becomes, and why it may differ."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import Any

from mtrl_plugins.verl.read_config import Keys


class Effect(StrEnum):
    """What a key of another trainer does in mtrl."""

    SAME = "same"
    """The same as there."""
    CHANGED = "different"
    """Something else than there; the rule's note says what and why."""
    IGNORED = "ignored"
    """Nothing: mtrl needs no such setting, and no result depends on it."""
    FIXED = "fixed"
    """Only one value (or a few) is supported; others would change the result and are rejected."""


class UnsupportedValue(Exception):
    """A value that would change the result and is not supported."""

    def __init__(self, problem: str, remedy: str, key: str = "") -> None:
        """`key` is the key to correct, if it is not the rule's own."""
        super().__init__(problem)
        self.problem, self.remedy, self.key = problem, remedy, key


@dataclass(frozen=True)
class SourceConfig:
    """The configuration to be translated, with the other trainer's defaults for missing keys."""

    keys: Keys
    defaults: Mapping[str, Any]

    def __getitem__(self, name: str) -> Any:
        """A key's value; for a name that ends in `.*`, a mapping of the keys below it."""
        if name.endswith(".*"):
            stem = name.removesuffix("*")
            return {key.removeprefix(stem): placed.value for key, placed in self.keys.items() if key.startswith(stem)}
        return self.keys[name].value if name in self.keys else self.defaults.get(name)

    def has(self, name: str) -> bool:
        return name in self.keys

    def count(self, name: str) -> int:
        """A key's value, which has to be an integer."""
        return parse_count(self[name], name)

    def number(self, name: str) -> float:
        """A key's value, which has to be a number."""
        return parse_number(self[name], name)


Convert = Callable[[Any, SourceConfig], Any]
"""Converts a key's value to that of the setting; None leaves the setting out. Raises `UnsupportedValue`."""


@dataclass(frozen=True)
class Rule:
    """How one key of another trainer is translated."""

    names: Sequence[str]
    """The name in the other trainer's code, then those in its documents and older releases. `*` matches all below."""
    setting: str = ""
    """The setting of mtrl that it becomes."""
    effect: Effect = Effect.SAME
    note: str = ""
    default: Any = None
    """The other trainer's default."""
    convert: Convert | None = field(default=None, compare=False)

    @property
    def name(self) -> str:
        """The canonical name."""
        return self.names[0]

    def canonical_name(self, key: str) -> str:
        """The canonical name of a key that matches this rule in any spelling."""
        if not self.name.endswith(".*"):
            return self.name
        stem = next((name[:-1] for name in self.names if key.startswith(name[:-1])), "")
        return self.name[:-1] + key.removeprefix(stem) if stem else key


@dataclass(frozen=True)
class KeyTable:
    """The rules for all keys of another trainer, used by the translation and printed in the migration guide."""

    framework: str
    rules: tuple[Rule, ...]
    extra_settings: Mapping[str, tuple[Any, str]]
    """Settings that no key translates to: for each its value and the reason."""

    @cached_property
    def rule_by_name(self) -> Mapping[str, Rule]:
        return {name: rule for rule in self.rules for name in rule.names}

    @cached_property
    def defaults(self) -> Mapping[str, Any]:
        return {rule.name: rule.default for rule in self.rules if rule.default is not None}

    @property
    def default_place(self) -> str:
        """Stands in error messages for the place of a key that is not written anywhere."""
        return f"{self.framework}'s default"

    def find_rule(self, key: str) -> Rule | None:
        """The rule of a key, or of the closest `*` above it."""
        if key in self.rule_by_name:
            return self.rule_by_name[key]
        steps = key.split(".")
        above = (f"{'.'.join(steps[:depth])}.*" for depth in range(len(steps), 0, -1))
        return next((self.rule_by_name[star] for star in above if star in self.rule_by_name), None)


def allow_only(*allowed: Any, problem: str = "", remedy: str) -> Convert:
    """A conversion that sets nothing and rejects all other values."""

    def convert(value: Any, config: SourceConfig) -> None:
        if value not in allowed and not (value in ({}, [], "", None) and None in allowed):
            raise UnsupportedValue(problem or f"{value!r} is not supported", remedy)

    return convert


def parse_number(value: Any, key: str = "") -> float:
    """The value, which has to be a number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise UnsupportedValue(f"{value!r} is not a number", "write a number", key)
    return value


def parse_count(value: Any, key: str = "") -> int:
    """The value, which has to be an integer."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise UnsupportedValue(f"{value!r} is not an integer", "write an integer", key)
    return value
