"""A row of the table: a key of verl's under all its names, what it becomes here, and why where that is not the same."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import Any

from trainer.verl.written import Keys


class How(StrEnum):
    SAME = "same"
    """It means here what it meant there."""
    BETTER = "better"
    """It means something else here, and the row says why."""
    IDLE = "nothing to set"
    """There is nothing here for it to say, and no result depends on it."""
    REFUSED = "refused"
    """Other values than verl's default would change the result, and cannot be had."""


class No(Exception):
    """A value that would change the result and cannot be had here."""

    def __init__(self, problem: str, remedy: str, key: str = "") -> None:
        """`key` is the one to be corrected, where it is not the row's own."""
        super().__init__(problem)
        self.problem, self.remedy, self.key = problem, remedy, key


@dataclass(frozen=True)
class Asked:
    """All that was asked for: a key that was left out has verl's default."""

    keys: Keys
    defaults: Mapping[str, Any]

    def __getitem__(self, name: str) -> Any:
        """A key's value; of a key with a star, a mapping of what lies under it."""
        if name.endswith(".*"):
            stem = name.removesuffix("*")
            return {key.removeprefix(stem): given.value for key, given in self.keys.items() if key.startswith(stem)}
        return self.keys[name].value if name in self.keys else self.defaults.get(name)

    def has(self, name: str) -> bool:
        return name in self.keys

    def count(self, name: str) -> int:
        return count(self[name], name)

    def number(self, name: str) -> float:
        return number(self[name], name)


Make = Callable[[Any, Asked], Any]
"""The value there -> the value here; None sets nothing. Raises `No`."""


@dataclass(frozen=True)
class Row:
    theirs: Sequence[str]
    """As the code had it, then as documents and older releases had it. `*` is everything below."""
    ours: str = ""
    """The setting it becomes."""
    how: How = How.SAME
    why: str = ""
    default: Any = None
    """What verl takes where the key is left out."""
    make: Make | None = field(default=None, compare=False)

    @property
    def name(self) -> str:
        return self.theirs[0]

    def named(self, key: str) -> str:
        """A key of this row, in whichever spelling, in the one that counts."""
        if not self.name.endswith(".*"):
            return self.name
        stem = next((one[:-1] for one in self.theirs if key.startswith(one[:-1])), "")
        return self.name[:-1] + key.removeprefix(stem) if stem else key


@dataclass(frozen=True)
class Table:
    """All keys of another trainer: what is translated by, and what is shown."""

    of: str
    """Whose they are."""
    rows: tuple[Row, ...]
    beside: Mapping[str, tuple[Any, str]]
    """What it has no key for: each setting's value, and why."""

    @cached_property
    def names(self) -> Mapping[str, Row]:
        return {name: row for row in self.rows for name in row.theirs}

    @cached_property
    def defaults(self) -> Mapping[str, Any]:
        return {row.name: row.default for row in self.rows if row.default is not None}

    @property
    def left_out(self) -> str:
        """The place of what nobody wrote."""
        return f"what {self.of} takes where nothing is written"

    def row_of(self, key: str) -> Row | None:
        """The row of a key, or of the closest star above it."""
        if key in self.names:
            return self.names[key]
        steps = key.split(".")
        above = (f"{'.'.join(steps[:depth])}.*" for depth in range(len(steps), 0, -1))
        return next((self.names[star] for star in above if star in self.names), None)


def only(*allowed: Any, problem: str = "", remedy: str) -> Make:
    """Other values are refused."""

    def make(value: Any, asked: Asked) -> None:
        if value not in allowed and not (value in ({}, [], "", None) and None in allowed):
            raise No(problem or f"{value!r} cannot be had here", remedy)

    return make


def number(value: Any, key: str = "") -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise No(f"{value!r} is no number", "write a number", key)
    return value


def count(value: Any, key: str = "") -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise No(f"{value!r} is no whole number", "write one", key)
    return value
