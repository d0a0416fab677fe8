"""Tables of another trainer's keys: the names of each key, the setting that it becomes, and why it may differ.

A table is a file `keys.yaml` beside the functions that convert values; `Row` says what stands in it. It is used by the
translation and printed in the migration guide.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from gateway.config.reader import read_file

COMMAND_LINE = "the command line"


@dataclass(frozen=True, slots=True)
class PlacedValue:
    """A value with the place where it was written, such as `run.yaml:12`."""

    value: Any
    place: str


Keys = dict[str, PlacedValue]


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


class Row(BaseModel):
    """A row of a table."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    key: str | list[str] = []
    """The names of a key."""
    each: list[str] = []
    """In its place: keys that have all else in common."""
    to: str = ""
    """The setting."""
    effect: Effect = Effect.SAME
    note: str = ""
    default: Any = None
    """The other trainer's default."""
    refuse: str = ""
    """What to do instead, for a key that may only have its default."""
    only: list[Any] | None = None
    """The values that it may have, and nothing else."""
    same_as: str = ""
    """Another key, whose value it may have too."""
    where: dict[str, Any] = {}
    """Values of other keys without which any value will do."""
    remedy: str = ""
    """What to do where it has another value."""
    choose: list[tuple[Any, Any]] | None = None
    """Pairs of a value and that of the setting; there are no others."""
    least: int | None = None
    """The least value of the setting; a lower one becomes this one."""
    convert: str = ""
    """The function that converts the value."""

    def make_rules(self, functions: Mapping[str, Any]) -> Iterator[Rule]:
        """The rules of this row; `functions` has those that convert values."""
        if self.refuse:
            self.effect, self.note = Effect.FIXED, self.refuse
        convert = functions[self.convert] if self.convert else self._find_convert()
        names = [[name] for name in self.each] or [[self.key] if isinstance(self.key, str) else self.key]
        return (Rule(of_key, self.to, self.effect, self.note, self.default, convert) for of_key in names)

    def _find_convert(self) -> Convert | None:
        if self.choose is not None:
            return self._choose
        if self.least is not None:
            return self._raise_to_least
        return self._allow if self.refuse or self.only is not None else None

    def _allow(self, value: Any, config: SourceConfig) -> None:
        allowed = [self.default] if self.only is None else self.only
        if value in allowed or (value in ({}, [], "", None) and None in allowed):
            return
        if all(config[key] == needed for key, needed in self.where.items()) and not (
            self.same_as and value == config[self.same_as]
        ):
            raise UnsupportedValue(f"{value!r} is not supported", self.remedy or self.refuse)

    def _choose(self, value: Any, config: SourceConfig) -> Any:
        for supported, setting in self.choose or ():
            if value == supported:
                return setting
        if value is None:
            return None
        known = ", ".join(str(known).lower() for known, _ in self.choose or ())
        raise UnsupportedValue(f"{value!r} is not supported", f"write one of {known}")

    def _raise_to_least(self, value: Any, config: SourceConfig) -> int | None:
        return None if value is None else max(self.least or 0, parse_count(value))


def make_rules(rows: Iterable[Mapping[str, Any]], functions: Mapping[str, Any]) -> tuple[Rule, ...]:
    """The rules of a table's rows."""
    return tuple(rule for row in rows for rule in Row.model_validate(row).make_rules(functions))


@dataclass(frozen=True)
class KeyTable:
    """The rules for all keys of another trainer."""

    framework: str
    rules: tuple[Rule, ...]
    extra_settings: Mapping[str, tuple[Any, str]]
    """Settings that no key translates to: for each its value and the reason."""

    @classmethod
    def read(cls, file: Path, functions: Mapping[str, Any]) -> KeyTable:
        """The table in a file; `functions` are those that its rows name."""
        content: Any = read_file(file)
        extra = {setting: (value, why) for setting, (value, why) in content["extra"].items()}
        return cls(content["framework"], make_rules(content["keys"], functions), extra)

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
